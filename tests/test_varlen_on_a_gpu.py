"""What only a GPU can show of varlen and windows: real sizes, graphs, equal bits on every run, stores in bounds."""

from __future__ import annotations

import random
from math import prod

import pytest
import torch
from test_attention import poison
from test_varlen import MASKS, has_the_bits_of_each_alone
from torch._dynamo.testing import CompileCounterWithBackend
from varlen_oracle import (
    NAN,
    attend,
    check,
    compact,
    compare,
    dense,
    draw,
    expected,
    ours,
    padded,
    rows_of_kind,
    same_bits,
    strided,
)

import flashattn
from flashattn import launch, settings

pytestmark = pytest.mark.gpu
DTYPE, HEADS, DIMS = torch.float16, (4, 2), (64, 64)


@pytest.mark.parametrize("mask", MASKS)
def test_packed_sequences_of_a_thousand_rows(mask):
    poison("cuda")
    check(compact([1000, 1, 127, 0, 513]), compact([700, 129, 64, 30, 1025]), device="cuda", heads=HEADS, **MASKS[mask])


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("window", [(0, 0), (127, 0), (129, 65), (1000, -1), (-1, 300)], ids=str)
def test_windows_over_four_thousand_keys(window, causal):
    poison("cuda")
    rows = dense(1, 4099), dense(1, 4099)
    check(*rows, device="cuda", heads=(2, 1), window_size=window, causal=causal)


@pytest.mark.parametrize("alignment", ["bottom_right", "top_left"])
@pytest.mark.parametrize(("seqlen_q", "seqlen_k"), [(4099, 1000), (1000, 4099)])
def test_windows_where_lengths_differ_by_thousands(seqlen_q, seqlen_k, alignment):
    rows = dense(1, seqlen_q), dense(1, seqlen_k)
    check(*rows, device="cuda", heads=(2, 1), window_size=(200, 77), causal_alignment=alignment)


@pytest.mark.parametrize("kind", ["padded", "compact", "strided", "partly used"])
def test_a_batch_of_ragged_lengths(kind):
    chosen = random.Random(1)
    lengths_q, lengths_k = ([chosen.choice((0, 1, 63, 64, 65, 300, 517)) for _ in range(22)] for _ in range(2))
    poison("cuda")
    rows = rows_of_kind(kind, lengths_q, 1), rows_of_kind(kind, lengths_k, 2)
    check(*rows, device="cuda", heads=HEADS, causal=True, window_size=(100, 0))


def test_four_thousand_sequences_of_sixteen_tokens():
    """As 4096 padded batch elements: the same bits."""
    packed, batch = compact([16] * 4096), padded([16] * 4096, 16)
    q, k, v, dout, dlse = draw(packed, packed, DTYPE, HEADS, DIMS, "cuda")
    got = ours(q, k, v, dout, dlse, packed, packed, causal=True)
    parts = (x.view(4096, 16, *x.shape[1:]) for x in (q, k, v, dout))
    want = ours(*parts, dlse.view(4, 4096, 16).transpose(0, 1).contiguous(), batch, batch, causal=True)
    for name in ("out", "dq", "dk", "dv"):
        assert torch.equal(getattr(got, name), getattr(want, name).flatten(0, 1)), name
    assert torch.equal(got.lse, want.lse.transpose(0, 1).flatten(1))


def test_twenty_thousand_sequences_of_random_length():
    chosen = random.Random(2)
    lengths = [chosen.randrange(41) for _ in range(20000)]
    rows = compact(lengths, slack=77)
    q, k, v, dout, dlse = draw(rows, rows, DTYPE, (2, 1), DIMS, "cuda")
    got = ours(q, k, v, dout, dlse, rows, rows)
    for i in (0, 1, 127, 128, 129, 16383, 16384, 19998, 19999):
        at = rows.index[i]
        own = compact([lengths[i]])
        parts = [x[at].contiguous() for x in (q, k, v, dout)]
        one = ours(*parts, dlse[:, at].contiguous(), own, own)
        for name in ("out", "dq", "dk", "dv"):
            assert torch.equal(getattr(got, name)[at], getattr(one, name)), (i, name)
    for name in ("out", "dq", "dk", "dv"):
        assert (getattr(got, name)[-77:] == 0).all() and torch.isfinite(getattr(got, name)).all(), name


@pytest.mark.parametrize("mask", ["full", "causal", "a window"])
def test_a_sequence_has_the_same_bits_alone_and_in_a_batch(mask):
    lengths_q, lengths_k = [517, 1, 128, 300], [300, 64, 129, 1000]
    for rows in (
        (compact(lengths_q), compact(lengths_k)),
        (padded(lengths_q), compact(lengths_k, slack=5)),
        (strided(lengths_q, [n + 3 for n in lengths_q]), padded(lengths_k)),
    ):
        assert has_the_bits_of_each_alone(*rows, torch.bfloat16, HEADS, DIMS, "cuda", **MASKS[mask])


@pytest.mark.parametrize("dims", [(64, 64), (128, 128)], ids=str)
@pytest.mark.parametrize("mask", ["causal", "a window"])
def test_twenty_runs_give_the_same_bits(mask, dims):
    rows = compact([700, 3, 517, 64]), compact([600, 129, 1000, 1])
    tensors = draw(*rows, torch.bfloat16, (8, 2), dims, "cuda")
    first = ours(*tensors, *rows, deterministic=True, **MASKS[mask])
    assert all(same_bits(first, ours(*tensors, *rows, deterministic=True, **MASKS[mask])) for _ in range(20))


@pytest.mark.parametrize("kind", ["padded", "compact", "strided"])
def test_a_graph_replays_with_other_lengths(kind):
    """What is captured reads lengths from the GPU: each replay equals an eager call with the same contents."""
    rows = rows_of_kind(kind, [100, 30, 270])
    q, k, v, dout, dlse = (x.nan_to_num(0.5) for x in draw(rows, rows, DTYPE, HEADS, DIMS, "cuda"))
    q_tables, k_tables = rows.tables("q", "cuda"), rows.tables("k", "cuda")
    tables = {**q_tables, **k_tables}
    ops = torch.ops.flashattn

    def step():
        out, lse = ops.attn_fwd(q, k, v, causal=True, window_left=90, **tables)
        return out, lse, *ops.attn_bwd(dout, q, k, v, out, lse, dlse, causal=True, window_left=90, **tables)

    step()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = step()
    for lengths in ([270, 100, 30], [1, 0, 399], [0, 0, 0], [100, 30, 270]):
        # The tensors stay as large as they were: sequences fill them otherwise, or leave rows behind the last.
        other = padded(lengths, rows.shape[1]) if kind == "padded" else compact(lengths)
        if kind == "padded" and max(lengths) > rows.shape[1]:
            continue
        if kind == "strided":
            other = strided([n // 2 for n in lengths], lengths)
        for side, given in (("q", q_tables), ("k", k_tables)):
            for name, table in other.tables(side, "cuda").items():
                given[name].copy_(table)
        for tensor in (q, k, v):
            tensor.normal_()
        for tensor in captured:
            tensor.fill_(NAN)
        graph.replay()
        torch.cuda.synchronize()
        assert all(torch.equal(a, b) for a, b in zip(captured, step(), strict=True)), lengths


def test_nothing_waits_for_the_gpu():
    rows = compact([100, 30, 270])
    q, k, v, *_ = draw(rows, rows, DTYPE, HEADS, DIMS, "cuda")
    cu = rows.tables("q", "cuda")["cu_seqlens_q"]
    q.requires_grad_()
    flashattn.flash_attn_varlen_func(q, k, v, cu, cu, causal=True).sum().backward()
    torch.cuda.set_sync_debug_mode("error")
    try:
        flashattn.flash_attn_varlen_func(q, k, v, cu, cu, 270, 270, causal=True).sum().backward()
        flashattn.flash_attn_varlen_func(q, k, v, cu.long(), cu.long(), causal=True)
    finally:
        torch.cuda.set_sync_debug_mode("default")


SENTINEL, MARGIN = 7.0, 1 << 14


@pytest.mark.parametrize("dims", [(64, 64), (24, 24)], ids=str)
@pytest.mark.parametrize(
    "rows",
    [
        pytest.param((dense(1, 48), dense(1, 8)), id="more queries than keys"),
        pytest.param((compact([40, 20]), compact([40, 4])), id="two sequences"),
        pytest.param((compact([20, 40], slack=9), compact([4, 40], slack=3)), id="two sequences and slack"),
        pytest.param((strided([1, 2, 1, 2], [2, 2, 3, 2]),) * 2, id="gaps"),
        pytest.param((padded([0, 17, 130]), padded([129, 0, 1])), id="padding"),
    ],
)
def test_no_kernel_stores_outside_of_its_tensors(rows, dims, monkeypatch):
    """Each output lies between sentinels, with NaN in it."""
    whole = []

    def allocate(shape, dtype, device):
        count = prod(shape)
        buffer = torch.full((count + 2 * MARGIN,), SENTINEL, dtype=dtype, device=device)
        buffer[MARGIN : MARGIN + count] = NAN
        whole.append((buffer, count))
        return buffer[MARGIN : MARGIN + count].view(shape)

    def new_empty(like, *size, dtype=None, device=None):
        shape = size[0] if len(size) == 1 and not isinstance(size[0], int) else size
        return allocate(tuple(shape), dtype or like.dtype, device or like.device)

    *tensors, dlse = draw(*rows, DTYPE, HEADS, dims, "cuda")
    launch.reset()
    with monkeypatch.context() as patch:
        patch.setattr(torch, "empty_like", lambda like: allocate(tuple(like.shape), like.dtype, like.device))
        patch.setattr(torch.Tensor, "new_empty", new_empty)
        got = ours(*tensors, dlse, *rows, window_size=(0, 0))
    assert len(whole) >= 6
    for buffer, count in whole:
        assert (buffer[:MARGIN] == SENTINEL).all() and (buffer[MARGIN + count :] == SENTINEL).all()
    wants = (expected(*tensors, dlse, *rows, dtype, window_size=(0, 0)) for dtype in (torch.float64, DTYPE))
    compare(got, *wants)


def test_debugging_reads_lengths_and_refuses_wrong_ones(monkeypatch):
    rows = compact([10, 200])
    q, k, v, *_ = draw(rows, rows, DTYPE, HEADS, DIMS, "cuda")

    def call(*numbers, **options):
        cu = torch.tensor(numbers, dtype=torch.int32, device="cuda")
        return flashattn.flash_attn_varlen_func(q, k, v, cu, cu, **options)

    want = call(0, 10, 210)
    monkeypatch.setenv("FLASHATTN_DEBUG", "1")
    settings.reset()
    launch.reset()
    try:
        assert torch.equal(call(0, 10, 210, max_seqlen_q=200, max_seqlen_k=200), want)
        for numbers, text in (((1, 10, 210), "expected 0 first"), ((0, 220, 210), "no entry below the one before")):
            with pytest.raises(ValueError, match=text):
                call(*numbers)
        with pytest.raises(ValueError, match="ends at 211 but there are 210 rows"):
            call(0, 10, 211)
        with pytest.raises(ValueError, match="max_seqlen_q is 128, but a sequence has 200 rows"):
            call(0, 10, 210, max_seqlen_q=128)
        with pytest.raises(ValueError, match=r"seqused_k gives the lengths \[11, 1\]"):
            call(0, 10, 210, seqused_k=torch.tensor([11, 1], dtype=torch.int32, device="cuda"))
    finally:
        monkeypatch.undo()
        settings.reset()
        launch.reset()


def test_tables_on_the_host_are_refused():
    rows = compact([10, 200])
    q, k, v, *_ = draw(rows, rows, DTYPE, HEADS, DIMS, "cuda")
    cu = torch.tensor([0, 10, 210], dtype=torch.int32)
    with pytest.raises(ValueError, match="cu_seqlens_q is on cpu but q is on cuda"):
        flashattn.flash_attn_varlen_func(q, k, v, cu, cu)


def test_rows_a_million_elements_apart():
    """Row times stride passes 2^31 in q, k, v and dout of packed sequences."""
    rows = compact([1000, 1300])
    q, k, v, dout, dlse = draw(rows, rows, DTYPE, (2, 2), DIMS, "cuda")
    want = ours(q, k, v, dout, dlse, rows, rows, causal=True)
    storage = torch.empty(2300 * 2**20, dtype=DTYPE, device="cuda")
    wide = [storage.as_strided((2300, 2, 64), (2**20, 64, 1), 128 * i) for i in range(4)]
    for view, x in zip(wide, (q, k, v, dout), strict=True):
        view.copy_(x)
    assert same_bits(want, ours(*wide, dlse, rows, rows, causal=True))


def test_a_window_costs_memory_for_its_outputs_alone():
    """32,768 queries and keys: no buffer of their product, which would hold a thousand million numbers."""
    rows = dense(1, 32768)
    tensors = draw(rows, rows, DTYPE, (2, 1), DIMS, "cuda")
    ours(*tensors, rows, rows, window_size=(1024, 0))
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    ours(*tensors, rows, rows, window_size=(1024, 0))
    assert torch.cuda.max_memory_allocated() - before < 64 * 2**20


def test_compiled_varlen_does_not_wait_or_compile_again():
    torch._dynamo.reset()
    counter = CompileCounterWithBackend("inductor")

    def attention(q, k, v, cu_q, cu_k):
        return flashattn.flash_attn_varlen_func(q * 1.0, k, v, cu_q, cu_k, causal=True, window_size=(50, 0)) * 2

    compiled, counts = torch.compile(attention, fullgraph=True, dynamic=True, backend=counter), []
    for lengths in ([50, 99, 81], [3, 20, 300, 5], [64, 2, 7, 400, 11, 3]):
        rows = compact(lengths)
        q, k, v, dout, _ = draw(rows, rows, DTYPE, (10, 5), DIMS, "cuda")
        q, k, v = (x.requires_grad_() for x in (q, k, v))
        tables = (*rows.tables("q", "cuda").values(), *rows.tables("k", "cuda").values())
        want, got = attention(q, k, v, *tables), compiled(q, k, v, *tables)
        counts.append(counter.frame_count)
        for a, b in zip(*(torch.autograd.grad(x, (q, k, v), dout) for x in (got, want)), strict=True):
            torch.testing.assert_close(a, b, rtol=2e-2, atol=2e-2)
        torch.testing.assert_close(got, want, rtol=2e-2, atol=2e-2)
    assert len(set(counts)) == 1


def test_packed_sequences_on_another_stream():
    rows = compact([300, 20])
    q, k, v, *_ = draw(rows, rows, DTYPE, HEADS, DIMS, "cuda")
    want = attend(q * 2, k, v, rows, rows)[0]
    stream = torch.cuda.Stream()
    torch.cuda.synchronize()
    with torch.cuda.stream(stream):
        tables = {**rows.tables("q", "cuda"), **rows.tables("k", "cuda")}
        torch.cuda._sleep(50_000_000)
        q.mul_(2)
        # The converted tables are made on this stream too, and given back before the kernel has run.
        long = [tables[name].long() for name in ("cu_seqlens_q", "cu_seqlens_k")]
        out = flashattn.flash_attn_varlen_func(q, k, v, *long)
    stream.synchronize()
    assert torch.equal(out, want)
