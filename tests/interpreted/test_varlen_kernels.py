"""The kernels in Triton's interpreter on sequences anywhere in memory: what they read, what they write, which masks."""

from __future__ import annotations

import json
import random
from contextlib import contextmanager
from math import prod

import pytest
import torch
import triton
import triton.language as tl
from hypothesis import HealthCheck, given
from hypothesis import settings as hypothesis_settings
from te_layouts import HEADS_FIRST, build
from te_layouts import LAYOUTS as TE_LAYOUTS
from test_properties import cases, holds
from test_varlen import EMPTY, MASKS, has_the_bits_of_each_alone
from varlen_oracle import (
    KINDS,
    NAN,
    attend,
    check,
    compact,
    compare,
    dense,
    draw,
    expected,
    one_thread,
    ours,
    padded,
    partly_used,
    rows_of_kind,
    same_bits,
    strided,
    visible,
)

from flashattn import launch, layout, settings
from flashattn.jit import interpreter
from flashattn.kernels.flash_common import rows_of, tile_of

__all__ = ["one_thread"]
SENTINEL = 7.0
MARGIN = 4096
LOW = [torch.float16, torch.bfloat16, torch.float32]
KERNELS = ("attn_fwd", "bwd_preprocess", "bwd_dkdv", "bwd_dq")


@pytest.fixture(autouse=True)
def guarded(monkeypatch):
    """Whatever is allocated holds NaN and lies between sentinels; afterwards none of these has changed."""
    assert launch.interpreting(), "run with TRITON_INTERPRET=1"
    whole, empty = [], torch.empty

    def allocate(shape, dtype, device):
        count = prod(shape)
        if device.type != "cpu" or not dtype.is_floating_point:
            return empty(shape, dtype=dtype, device=device)
        buffer = torch.full((count + 2 * MARGIN,), SENTINEL, dtype=dtype)
        buffer[MARGIN : MARGIN + count] = NAN
        whole.append((buffer, count))
        return buffer[MARGIN : MARGIN + count].view(shape)

    def new_empty(like, *size, dtype=None, device=None):
        shape = size[0] if len(size) == 1 and not isinstance(size[0], int) else size
        return allocate(tuple(shape), dtype or like.dtype, torch.device(device or like.device))

    monkeypatch.setattr(torch, "empty_like", lambda like: allocate(tuple(like.shape), like.dtype, like.device))
    monkeypatch.setattr(torch.Tensor, "new_empty", new_empty)
    yield whole
    for buffer, count in whole:
        assert (buffer[:MARGIN] == SENTINEL).all() and (buffer[MARGIN + count :] == SENTINEL).all()


@contextmanager
def tiles(block_m: int, block_n: int, path):
    """All kernels with these tiles."""
    tile = {"block_m": block_m, "block_n": block_n, "num_warps": 4, "num_stages": 1}
    file = path / f"{block_m}x{block_n}.json"
    file.write_text(json.dumps(dict.fromkeys(KERNELS, tile)))
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("FLASHATTN_TILES", str(file))
        settings.reset()
        launch.reset()
        yield
    settings.reset()
    launch.reset()


@pytest.mark.parametrize("mask", MASKS)
def test_packed_sequences_in_every_dtype(mask):
    for dtype in LOW:
        check(compact([37, 1]), compact([17, 70]), dtype=dtype, heads=(2, 1), dims=(40, 24), **MASKS[mask])


@pytest.mark.newest
@pytest.mark.parametrize("kind_k", KINDS)
@pytest.mark.parametrize("kind_q", KINDS)
def test_any_kind_of_rows_goes_with_any_other(kind_q, kind_k):
    rows_q, rows_k = rows_of_kind(kind_q, [5, 0, 33], 1), rows_of_kind(kind_k, [9, 12, 40], 2)
    masks = ("full", "a causal window", "a window from the first key")
    check(rows_q, rows_k, heads=(2, 1), **MASKS[masks[(KINDS.index(kind_q) + KINDS.index(kind_k)) % 3]])


def test_gaps_between_sequences_are_not_read_and_give_zero():
    """cu_seqlens [0, 1, 3, 4, 6] at the offsets [0, 2, 4, 7, 9]."""
    rows = strided([1, 2, 1, 2], [2, 2, 3, 2])
    got = check(rows, rows)
    for gap in (1, 5, 6):
        assert (got.out[gap] == 0).all() and (got.lse[:, gap] == float("-inf")).all()


@pytest.mark.parametrize("case", EMPTY)
def test_empty_sequences_may_stand_anywhere(case):
    lengths_q, lengths_k = EMPTY[case]
    check(compact(lengths_q), compact(lengths_k), heads=(1, 1), window_size=(9, 4))
    check(compact(lengths_q, slack=40), padded(lengths_k), heads=(1, 1))
    check(padded(lengths_q), compact(lengths_k, slack=40), heads=(1, 1), causal=True)


@pytest.mark.parametrize(("block_m", "block_n"), [(16, 128), (32, 32), (64, 16), (128, 64)])
def test_rows_without_a_key_do_not_depend_on_tiles(block_m, block_n, tmp_path):
    rows_q, rows_k = compact([50, 0, 20], slack=20), strided([8, 5, 20], [10, 5, 60])
    with tiles(block_m, block_n, tmp_path):
        got = check(rows_q, rows_k, heads=(1, 1), dims=(24, 24), causal=True)
        assert (got.out[:42] == 0).all() and (got.lse[:, :42] == float("-inf")).all() and (got.dq[:42] == 0).all()
        check(rows_q, rows_k, heads=(1, 1), window_size=(30, 3), causal_alignment="top_left")
        check(dense(1, 48), dense(1, 8), heads=(1, 1), dims=(24, 24), window_size=(0, 0))


@pytest.mark.parametrize("order", [(0, 1), (1, 0)], ids=["long first", "short first"])
def test_a_sequence_with_few_keys_does_not_disturb_its_neighbour(order, tmp_path):
    lengths = ([40, 20], [40, 4])
    for block_m, block_n in ((16, 64), (64, 16)):
        with tiles(block_m, block_n, tmp_path):
            check(*(compact([these[i] for i in order]) for these in lengths), heads=(1, 1), window_size=(0, 0))


@pytest.mark.parametrize("window", [(17, 1), (1, 17), (0, 0), (-1, 14), (30, 14), (94, 78), (1000, 1000)], ids=str)
@pytest.mark.parametrize(("block_m", "block_n"), [(16, 16), (64, 16), (16, 64)])
def test_a_window_visits_every_block_it_must(window, block_m, block_n, tmp_path):
    """With tiles of all proportions.

    Bounds of a multiple of 16 and 1 make blocks of which a single row is seen; less 2, blocks all but for one row.
    """
    with tiles(block_m, block_n, tmp_path):
        check(dense(1, 33), dense(1, 129), heads=(1, 1), window_size=window)
        check(dense(1, 129), dense(1, 33), heads=(1, 1), window_size=window, causal_alignment="top_left")


@pytest.mark.parametrize("mask", ["full", "causal", "a window"])
def test_a_sequence_has_the_same_bits_alone_and_in_a_batch(mask):
    for kind_q, kind_k in (("strided", "compact"), ("compact", "padded")):
        rows_q, rows_k = rows_of_kind(kind_q, [1, 64, 8], 1), rows_of_kind(kind_k, [33, 4, 65], 2)
        assert has_the_bits_of_each_alone(rows_q, rows_k, torch.float16, (2, 1), (16, 16), **MASKS[mask])


def test_many_tiny_sequences_are_told_apart():
    """More than 128 are searched in two steps."""
    chosen = random.Random(0)
    lengths_q, lengths_k = ([chosen.choice((0, 1, 2, 3)) for _ in range(140)] for _ in range(2))
    rows = compact(lengths_q, slack=5), compact(lengths_k)
    q, k, v, *_ = draw(*rows, torch.float32, (1, 1), (8, 8))
    out, lse = attend(q, k, v, *rows, causal=True)
    want = expected(q, k, v, None, None, *rows, torch.float64, causal=True)
    torch.testing.assert_close(out.double(), want.out, rtol=0, atol=1e-5)
    torch.testing.assert_close(lse.double(), want.lse, rtol=1e-5, atol=1e-5)


def test_no_bound_is_the_same_bits_as_no_window():
    rows = compact([33, 40]), compact([65, 20])
    tensors = draw(*rows, torch.float16, (1, 1), (16, 16))
    for causal in (False, True):
        want = ours(*tensors, *rows, causal=causal)
        for window in ((-1, -1), (None, None)):
            assert same_bits(want, ours(*tensors, *rows, causal=causal, window_size=window))
        wide = ours(*tensors, *rows, causal=causal, window_size=(1000, 1000))
        compare(wide, *(expected(*tensors, *rows, t, causal=causal) for t in (torch.float64, torch.float16)))


def test_the_backward_repeats_its_bits():
    rows = strided([33, 0, 40], [40, 3, 40]), compact([65, 5, 20])
    tensors = draw(*rows, torch.float16, (2, 1), (16, 16))
    first = ours(*tensors, *rows, window_size=(20, 5))
    assert all(same_bits(first, ours(*tensors, *rows, window_size=(20, 5))) for _ in range(3))


def test_the_gradient_of_out_may_be_expanded_or_transposed():
    rows = strided([5, 9], [6, 9])
    q, k, v, dout, dlse = draw(rows, rows, torch.float32, (2, 1), (16, 16))
    tables = {**rows.tables("q"), **rows.tables("k")}
    out, lse = torch.ops.flashattn.attn_fwd(q, k, v, **tables)
    for other in (
        torch.ones(16).expand(15, 2, 16),
        dout[:, :1].expand(15, 2, 16),
        dout.transpose(0, 1).contiguous().transpose(0, 1),
        torch.stack([dout, dout], -1)[..., 0],
    ):
        got, want = (
            torch.ops.flashattn.attn_bwd(x, q, k, v, out, lse, dlse, **tables) for x in (other, other.contiguous())
        )
        assert all(torch.equal(a, b) for a, b in zip(got, want, strict=True))
    want = torch.ops.flashattn.attn_bwd(dout, q, k, v, out, lse, dlse, **tables)
    wide, transposed = torch.stack([lse, lse + 1], -1)[..., 0], dlse.T.contiguous().T
    got = torch.ops.flashattn.attn_bwd(dout, q, k, v, out, wide, transposed, **tables)
    assert all(torch.equal(a, b) for a, b in zip(got, want, strict=True))


def test_tables_may_be_int64_a_slice_or_strided():
    rows_q, rows_k = compact([3, 17]), partly_used([5, 9], [7, 9])
    check(rows_q, rows_k, table_dtype=torch.int64)
    q, k, v, *_ = draw(rows_q, rows_k, torch.float32, (2, 1), (16, 16))
    want = attend(q, k, v, rows_q, rows_k)
    tables = [torch.tensor(x, dtype=torch.int32) for x in ((0, 3, 20), (0, 7, 16), (5, 9))]
    odd = [torch.cat([x.new_full((1,), -7), x])[1:] for x in tables]
    doubled = [torch.stack([x, x + 99], -1).reshape(-1)[::2] for x in tables]
    for cu_q, cu_k, used in (odd, doubled):
        got = torch.ops.flashattn.attn_fwd(q, k, v, cu_seqlens_q=cu_q, cu_seqlens_k=cu_k, seqused_k=used)
        assert all(torch.equal(a, b) for a, b in zip(got, want, strict=True))


@pytest.mark.parametrize("layout", TE_LAYOUTS + HEADS_FIRST)
def test_a_te_layout_reaches_the_kernels_without_a_copy(layout, monkeypatch):
    built, given = build(layout), {}

    def note(kernel, grid, tensors, strides, scalars):
        given[kernel.kernel.fn.__name__] = tensors[:3], strides

    monkeypatch.setattr(launch._Interpreted, "__call__", note)
    own = built.q, built.k, built.v
    out, lse = attend(*own, built.rows_q, built.rows_k)
    tables = {**built.rows_q.tables("q"), **built.rows_k.tables("k")}
    torch.ops.flashattn.attn_bwd(torch.zeros_like(out), *own, out, lse, **tables)
    for name in ("attn_fwd", "bwd_dkdv", "bwd_dq"):
        tensors, strides = given[name]
        for i, (tensor, mine) in enumerate(zip(tensors, own, strict=True)):
            assert tensor.data_ptr() == mine.data_ptr() and tensor.shape == mine.shape
            assert tuple(strides[3 * i : 3 * i + 3])[4 - mine.dim() :] == mine.stride()[:-1]


@pytest.mark.parametrize("layout", ["bsh3d", "thd_sbhd_sbhd"])
def test_a_te_layout_gives_the_bits_of_contiguous_tensors(layout):
    built = build(layout)
    rows = built.rows_q, built.rows_k
    dout, dlse = torch.randn(built.q.shape), torch.randn(attend(built.q, built.k, built.v, *rows)[1].shape)
    got = ours(built.q, built.k, built.v, dout, dlse, *rows, causal=True)
    copies = [x.contiguous() for x in (built.q, built.k, built.v)]
    assert same_bits(got, ours(*copies, dout, dlse, *rows, causal=True))


@triton.jit
def note_slots(
    # pointers
    seen_ptr, starts_ptr, lengths_ptr,
    # sizes and scalars
    heads, batch, seqlen, kind,
    # tiles
    BLOCK: tl.constexpr,
):  # fmt: skip
    pid = tl.program_id(0)
    seq, head, tile = tile_of(pid, heads, batch, seqlen, kind, starts_ptr, BLOCK)
    element, start, rows, used = rows_of(seq, batch, seqlen, kind, starts_ptr, lengths_ptr)
    tl.store(seen_ptr + pid * 7 + 0, seq)
    tl.store(seen_ptr + pid * 7 + 1, head)
    tl.store(seen_ptr + pid * 7 + 2, tile)
    tl.store(seen_ptr + pid * 7 + 3, element)
    tl.store(seen_ptr + pid * 7 + 4, start)
    tl.store(seen_ptr + pid * 7 + 5, rows)
    tl.store(seen_ptr + pid * 7 + 6, used)


@pytest.mark.parametrize("block", [16, 128])
@pytest.mark.parametrize("seed", range(4))
def test_every_tile_of_every_sequence_has_one_program(seed, block):
    chosen = random.Random(seed)
    sequences = (0, 1, 9, 140)[seed]
    lengths = [chosen.choice((0, 0, 1, 15, 16, 17, 40)) for _ in range(sequences)]
    rows = compact(lengths, slack=chosen.choice((0, 1, 100)))
    (total,), heads = rows.shape, 2 if sequences < 10 else 1
    starts = rows.tables("q")["cu_seqlens_q"]
    x = torch.zeros(total, heads, 1)
    interpreter.repair()
    programs = layout.located(x, x, (starts, starts, None, None, None, None))[0].tiles(block) * heads
    assert programs <= (total // block + sequences + 1) * heads
    seen = torch.full((programs, 7), -1, dtype=torch.int32)
    note_slots[(programs,)](seen, starts, starts, heads, sequences, total, 1, BLOCK=block)
    found = set()
    for seq, head, tile, element, start, count, used in seen.tolist():
        # What is behind the last sequence counts as one more, of which nothing is used.
        length = lengths[seq] if seq < sequences else total - rows.cu_seqlens[-1]
        assert (element, start, count) == (0, rows.cu_seqlens[seq], length) and 0 <= head < heads
        assert used == (length if seq < sequences else 0) and 0 <= tile <= -(-length // block)
        assert (seq, head, tile) not in found
        found.add((seq, head, tile))
    spare = total - rows.cu_seqlens[-1]
    for seq, length in enumerate([*lengths, spare]):
        for head in range(heads):
            assert {(seq, head, tile) for tile in range(-(-length // block))} <= found


def test_the_grid_grows_as_the_work_does(monkeypatch):
    """A head of 4096 sequences of 16 tokens has about a program for each, not one for each and every block."""
    grids = []

    def note(kernel, grid, *rest):
        grids.append((kernel.block_m, kernel.block_n, grid))

    monkeypatch.setattr(launch._Interpreted, "__call__", note)
    rows = compact([16] * 4096)
    q, k, v, *_ = draw(rows, rows, torch.float16, (1, 1), (16, 16))
    out, lse = attend(q, k, v, rows, rows)
    torch.ops.flashattn.attn_bwd(out, q, k, v, out, lse, **rows.tables("q"), **rows.tables("k"))
    assert len(grids) == 4
    assert all(grid <= 65536 // min(block_m, block_n or block_m) + 4097 for block_m, block_n, grid in grids)


@pytest.mark.parametrize("change", ["left", "right", "causal"])
def test_a_mask_that_is_off_by_one_is_seen(change, monkeypatch):
    import varlen_oracle

    def wrong(m, n, causal=False, window_size=(-1, -1), **rest):
        left, right = window_size
        keep = visible(m, n, False, (left + (change == "left"), right + (change == "right")), **rest)
        return keep | visible(m, n, False, (left, 0), **rest).roll(1, 1) if change == "causal" else keep

    rows = compact([33, 20]), compact([40, 9])
    options = {"window_size": (6, 0), "causal": change == "causal"}
    check(*rows, **options)
    monkeypatch.setattr(varlen_oracle, "visible", wrong)
    with pytest.raises(AssertionError):
        check(*rows, **options)


@pytest.mark.parametrize("name", ["out", "lse", "dq", "dk", "dv"])
def test_a_row_that_is_off_by_little_is_seen(name):
    rows = strided([33, 20], [35, 24]), compact([40, 9])
    tensors = draw(*rows, torch.float32, (2, 1), (16, 16))
    got = ours(*tensors, *rows)
    want, low = (expected(*tensors, *rows, dtype) for dtype in (torch.float64, torch.float32))
    compare(got, want, low)
    (got.lse[..., 3] if name == "lse" else getattr(got, name)[3]).add_(1e-3)
    with pytest.raises(AssertionError):
        compare(got, want, low)


@hypothesis_settings(
    max_examples=10, deadline=None, print_blob=True, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(cases(dims=((16, 16), (20, 7), (64, 64)), lengths=(0, 1, 7, 16, 17, 33), sequences=2))
def test_any_combination_is_what_float64_gives(case):
    holds(case)
