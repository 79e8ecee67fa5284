"""Sequences of different lengths, however they are stored: values, gradients, what is not read, and what is refused."""

from __future__ import annotations

from itertools import product

import pytest
import torch
from torch._dynamo.testing import CompileCounterWithBackend
from torch.library import opcheck
from varlen_oracle import (
    KINDS,
    attend,
    check,
    compact,
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

import flashattn
from flashattn import settings

__all__ = ["one_thread"]
DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]
MASKS = {
    "full": {},
    "causal": {"causal": True},
    "causal from the first key": {"causal": True, "causal_alignment": "top_left"},
    "a window": {"window_size": (9, 4)},
    "a causal window": {"window_size": (9, -1), "causal": True},
    "a window from the first key": {"window_size": (9, 4), "causal_alignment": "top_left"},
}
LENGTHS = (143, 1, 64, 8, 128, 4, 63)


def alone(q, k, v, dout, dlse, rows_q, rows_k, i, **options):
    """Sequence i by itself, as a batch of one, whose lengths are told: a dense call may have another kernel."""
    at_q, at_k = rows_q.index[i], rows_k.index[i]
    parts = [x[at][None].contiguous() for x, at in ((q, at_q), (k, at_k), (v, at_k), (dout, at_q))]
    its_dlse = dlse.transpose(-1, -2)[at_q].T[None].contiguous()
    rows = [padded([x.shape[1]], x.shape[1]) for x in parts[:2]]
    return ours(*parts, its_dlse, *rows, **options)


def has_the_bits_of_each_alone(rows_q, rows_k, dtype, heads, dims, device="cpu", **options) -> bool:
    tensors = draw(rows_q, rows_k, dtype, heads, dims, device)
    together = ours(*tensors, rows_q, rows_k, **options)
    equal = True
    for i, (at_q, at_k) in enumerate(zip(rows_q.index, rows_k.index, strict=True)):
        one = alone(*tensors, rows_q, rows_k, i, **options)
        equal &= torch.equal(together.out[at_q], one.out[0]) and torch.equal(together.dq[at_q], one.dq[0])
        equal &= torch.equal(together.dk[at_k], one.dk[0]) and torch.equal(together.dv[at_k], one.dv[0])
        equal &= torch.equal(together.lse.transpose(-1, -2)[at_q].T, one.lse[0])
    return equal


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("mask", MASKS)
@pytest.mark.parametrize("sequences", [1, 2, 7, 22])
def test_packed_sequences_give_what_float64_gives_one_by_one(sequences, mask, device):
    lengths_q = [LENGTHS[i % 7] for i in range(sequences)]
    lengths_k = [LENGTHS[(2 * i + 1) % 7] for i in range(sequences)]
    check(compact(lengths_q), compact(lengths_k), device=device, heads=(4, 2), **MASKS[mask])


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("spread", [1.0, 4.0])
def test_packed_sequences_are_right_in_every_dtype(dtype, spread, device):
    rows = compact(LENGTHS)
    check(rows, rows, dtype=dtype, dims=(64, 64), heads=(4, 2), spread=spread, device=device, causal=True)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("mask", MASKS)
@pytest.mark.parametrize("kind_k", KINDS)
@pytest.mark.parametrize("kind_q", KINDS)
def test_any_kind_of_rows_goes_with_any_other(kind_q, kind_k, mask, device):
    rows_q, rows_k = rows_of_kind(kind_q, [5, 0, 33, 70], 1), rows_of_kind(kind_k, [9, 12, 0, 100], 2)
    check(rows_q, rows_k, device=device, **MASKS[mask])


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("mask", ["full", "causal", "a window"])
def test_a_sequence_has_the_same_bits_alone_and_in_a_batch(mask, device):
    dtype = torch.float32 if device == "cpu" else torch.bfloat16
    for kind_q, kind_k in zip(KINDS[1:], (*KINDS[2:], KINDS[1]), strict=True):
        rows_q, rows_k = rows_of_kind(kind_q, LENGTHS, 1), rows_of_kind(kind_k, LENGTHS[::-1], 2)
        assert has_the_bits_of_each_alone(rows_q, rows_k, dtype, (4, 2), (64, 64), device, **MASKS[mask])


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("layout", ["contiguous", "rows first", "heads first"])
def test_padding_is_not_read_and_gives_zero(layout, device):
    rows_q, rows_k = padded([50, 0, 17, 64], 64), padded([20, 30, 0, 71])
    got = check(rows_q, rows_k, layouts=(layout,) * 4, device=device, causal=True)
    assert (got.out[2, 17:] == 0).all() and (got.lse[2, :, 17:] == float("-inf")).all()
    assert (got.dk[0, 20:] == 0).all() and (got.dv[1] == 0).all() and (got.dq[2] == 0).all()


@pytest.mark.parametrize("device", DEVICES)
def test_gaps_between_sequences_are_not_read_and_give_zero(device):
    """cu_seqlens [0, 1, 3, 4, 6] at the offsets [0, 2, 4, 7, 9]."""
    rows = strided([1, 2, 1, 2], [2, 2, 3, 2])
    assert rows.cu_seqlens == (0, 1, 3, 4, 6) and rows.padded == (0, 2, 4, 7, 9)
    got = check(rows, rows, device=device)
    for gap in (1, 5, 6):
        assert (got.out[gap] == 0).all() and (got.lse[:, gap] == float("-inf")).all()
        assert all((grad[gap] == 0).all() for grad in (got.dq, got.dk, got.dv))


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("order", [(0, 1), (1, 0)], ids=["long first", "short first"])
def test_a_sequence_with_few_keys_does_not_disturb_its_neighbour(order, device):
    lengths = ([40, 20], [40, 4])
    check(*(compact([these[i] for i in order]) for these in lengths), window_size=(0, 0), device=device)


EMPTY = {
    "no key in the first": ([20, 20], [0, 16]),
    "no key in the last": ([20, 20], [16, 0]),
    "no query in the first": ([0, 20], [16, 16]),
    "nothing in the middle": ([20, 0, 20], [16, 0, 16]),
    "several empty ones in a row": ([0, 0, 5, 0, 0, 0, 7, 0], [0, 3, 5, 0, 0, 4, 9, 0]),
    "one token, then none, for odd heads": ([0, 1, 0, 1], [0, 3, 0, 5]),
    "a single sequence without keys": ([20], [0]),
    "a single sequence without queries": ([0], [20]),
    "all empty": ([0, 0, 0], [0, 0, 0]),
    "queries alone": ([5, 6], [0, 0]),
    "keys alone": ([0, 0], [5, 6]),
    "no sequence": ([], []),
}


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("mask", ["full", "causal", "a window"])
@pytest.mark.parametrize("case", EMPTY)
def test_empty_sequences_may_stand_anywhere(case, mask, device):
    lengths_q, lengths_k = EMPTY[case]
    for rows_q, rows_k in (
        (compact(lengths_q), compact(lengths_k)),
        (compact(lengths_q, slack=9), compact(lengths_k, slack=5)),
        (padded(lengths_q), compact(lengths_k)),
        (compact(lengths_q), padded(lengths_k)),
        (strided(lengths_q, [n + 2 for n in lengths_q]), strided(lengths_k, [n + 1 for n in lengths_k])),
    ):
        check(rows_q, rows_k, heads=(9, 3), device=device, **MASKS[mask])


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("heads", [(4, 1), (4, 2)])
def test_keys_of_a_sequence_without_queries_get_zero_gradients(heads, device):
    rows_q, rows_k = compact([0, 121, 84, 0]), compact([254, 174, 84, 307])
    for causal in (False, True):
        got = check(rows_q, rows_k, heads=heads, causal=causal, device=device)
        for grad in (got.dk, got.dv):
            assert (grad[:254] == 0).all() and (grad[-307:] == 0).all()


@pytest.mark.parametrize("device", DEVICES)
def test_causal_with_more_queries_than_keys_in_a_batch(device):
    got = check(compact([76, 34, 146]), compact([1, 1, 1]), heads=(1, 1), spread=3.0, device=device, causal=True)
    assert (got.out[:75] == 0).all() and (got.dq[:75] == 0).all()


def test_two_rows_that_see_a_key_and_two_that_do_not():
    q, v = torch.zeros(4, 1, 16), torch.eye(2, 16)[:, None]
    cu_q, cu_k = (torch.tensor([0, n], dtype=torch.int32) for n in (4, 2))
    out, lse = flashattn.flash_attn_varlen_func(q, torch.zeros(2, 1, 16), v, cu_q, cu_k, causal=True, return_lse=True)
    want = torch.zeros(4, 16)
    want[2, 0], want[3, :2] = 1, 0.5
    assert torch.equal(out[:, 0], want)
    torch.testing.assert_close(lse[0], torch.tensor([float("-inf")] * 2 + [0.0, 0.693147]))


@pytest.mark.parametrize("device", DEVICES)
def test_rows_behind_the_last_sequence_do_not_spoil_a_projection(device):
    """The weights of a projection get finite gradients though its last rows belong to no sequence."""
    dtype = {"cpu": torch.float32, "cuda": torch.float16}[device]
    weight = torch.randn(24, 3 * 2 * 64, device=device, dtype=dtype).mul(0.1).requires_grad_()
    x = torch.randn(946, 24, device=device, dtype=dtype)
    cu = torch.tensor([0, 144, 432, 944], dtype=torch.int32, device=device)
    gradients = []
    for rows in (946, 944):
        qkv = (x[:rows] @ weight).view(rows, 3, 2, 64)
        out = flashattn.flash_attn_varlen_qkvpacked_func(qkv, cu, causal=True)
        assert (out[944:] == 0).all()
        gradients += torch.autograd.grad(out.sum(), weight)
    assert torch.isfinite(gradients[0]).all()
    near = {"cpu": {}, "cuda": {"rtol": 2e-2, "atol": 2e-2}}[device]
    torch.testing.assert_close(gradients[0], gradients[1], **near)


@pytest.mark.parametrize("device", DEVICES)
def test_lse_is_one_number_for_each_row_and_head_of_q(device):
    for kind_q, shape in (("compact", (3, 30)), ("strided", (3, 34)), ("padded", (3, 3, 20)), ("dense", (3, 3, 10))):
        rows_q, rows_k = rows_of_kind(kind_q, [3, 17, 10]), compact([5, 6, 7])
        got = check(rows_q, rows_k, heads=(3, 1), device=device)
        assert got.lse.shape == shape and got.lse.dtype == torch.float32, kind_q
        q, k, v, *_ = draw(rows_q, rows_k, torch.float16, (3, 1), (16, 16))
        tables = {**rows_q.tables("q", "meta"), **rows_k.tables("k", "meta")}
        out, lse = torch.ops.flashattn.attn_fwd(*(x.to("meta") for x in (q, k, v)), **tables)
        assert lse.shape == shape and lse.dtype == torch.float32 and out.shape == q.shape


def test_lse_of_equal_scores_is_the_logarithm_of_their_number():
    cu = torch.tensor([0, 2, 1026], dtype=torch.int32)
    x = torch.zeros(1026, 1, 16)
    lse = flashattn.flash_attn_varlen_func(x, x, x, cu, cu, return_lse=True)[1]
    torch.testing.assert_close(lse[0], torch.tensor([0.693147] * 2 + [6.931472] * 1024))


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("kind", KINDS)
def test_lse_alone_carries_gradient(kind, device):
    rows_q, rows_k = rows_of_kind(kind, [5, 0, 40]), rows_of_kind(kind, [9, 3, 30])
    check(rows_q, rows_k, with_dout=False, causal=True, device=device)
    check(rows_q, rows_k, with_dlse=False, causal=True, device=device)


@pytest.mark.parametrize("kind", KINDS)
def test_gradients_pass_gradcheck(kind):
    rows_q, rows_k = rows_of_kind(kind, [2, 0, 3], 1), rows_of_kind("strided", [3, 2, 2], 2)
    tensors = draw(rows_q, rows_k, torch.float64, (2, 1), (3, 2))[:3]
    q, k, v = (x.nan_to_num(0.0).requires_grad_() for x in tensors)

    def function(q, k, v):
        out, lse = attend(q, k, v, rows_q, rows_k, window_size=(1, 1))
        return out, lse.masked_fill(lse.isinf(), 0.0)

    assert torch.autograd.gradcheck(function, (q, k, v))


@pytest.mark.parametrize("device", DEVICES)
def test_packed_forms_are_views_of_one_tensor(device):
    cu = torch.tensor([0, 3, 20], dtype=torch.int32, device=device)
    dtype = {"cpu": torch.float32, "cuda": torch.float16}[device]
    qkv = torch.randn(20, 3, 4, 64, device=device, dtype=dtype).requires_grad_()
    want = flashattn.flash_attn_varlen_func(*qkv.unbind(1), cu, cu, causal=True)
    (right,) = torch.autograd.grad(want.square().sum(), qkv)
    kv = qkv.detach()[:, 1:].requires_grad_()
    q = qkv.detach()[:, 0].requires_grad_()
    for out, inputs in (
        (flashattn.flash_attn_varlen_qkvpacked_func(qkv, cu, 17, causal=True), (qkv,)),
        (flashattn.flash_attn_varlen_kvpacked_func(q, kv, cu, cu, 17, 17, causal=True), (q, kv)),
    ):
        assert torch.equal(out, want)
        grads = torch.autograd.grad(out.square().sum(), inputs)
        got = grads[0] if len(grads) == 1 else torch.cat([grads[0][:, None], grads[1]], 1)
        assert torch.equal(got, right)


@pytest.mark.parametrize("device", DEVICES)
def test_tables_may_be_int64_a_slice_or_strided(device):
    rows_q, rows_k = compact([3, 17]), partly_used([5, 9], [7, 9])
    dtype = {"cpu": torch.float32, "cuda": torch.float16}[device]
    q, k, v, *_ = draw(rows_q, rows_k, dtype, (2, 1), (64, 64), device)
    want = attend(q, k, v, rows_q, rows_k)
    got = attend(q, k, v, rows_q, rows_k, table_dtype=torch.int64)
    assert all(torch.equal(a, b) for a, b in zip(got, want, strict=True))
    tables = [torch.tensor(x, dtype=torch.int32, device=device) for x in ((0, 3, 20), (0, 7, 16), (5, 9))]
    odd = [torch.cat([x.new_full((1,), -7), x])[1:] for x in tables]
    doubled = [torch.stack([x, x + 99], -1).reshape(-1)[::2] for x in tables]
    for cu_q, cu_k, used in (odd, doubled):
        got = flashattn.flash_attn_varlen_func(q, k, v, cu_q, cu_k, seqused_k=used, return_lse=True)
        assert all(torch.equal(a, b) for a, b in zip(got, want, strict=True))


@pytest.mark.parametrize("device", DEVICES)
def test_max_seqlen_changes_nothing(device):
    rows = compact([10, 200])
    dtype = {"cpu": torch.float32, "cuda": torch.float16}[device]
    q, k, v, *_ = draw(rows, rows, dtype, (2, 1), (64, 64), device)
    cu = rows.tables("q", device)["cu_seqlens_q"]
    want = flashattn.flash_attn_varlen_func(q, k, v, cu, cu)
    for most in (200, 4096, torch.tensor(200), 128):
        assert torch.equal(flashattn.flash_attn_varlen_func(q, k, v, cu, cu, most, most), want)


@pytest.fixture
def debug(monkeypatch):
    monkeypatch.setenv("FLASHATTN_DEBUG", "1")
    settings.reset()
    yield
    monkeypatch.undo()
    settings.reset()


@pytest.mark.parametrize("side", ["q", "k"])
def test_a_max_seqlen_that_is_too_small_raises_when_debugging(debug, side):
    rows = compact([10, 200])
    q, k, v, *_ = draw(rows, rows, torch.float32, (2, 1), (8, 8))
    cu = torch.tensor([0, 10, 210], dtype=torch.int32)
    fits = {"max_seqlen_q": 200, "max_seqlen_k": torch.tensor(200)}
    flashattn.flash_attn_varlen_func(q, k, v, cu, cu, **fits)
    fits[f"max_seqlen_{side}"] = 128
    with pytest.raises(ValueError, match=f"max_seqlen_{side} is 128, but a sequence has 200 rows"):
        flashattn.flash_attn_varlen_func(q, k, v, cu, cu, **fits)


def ints(*numbers, dtype=torch.int32):
    return torch.tensor(numbers, dtype=dtype)


WRONG = {
    "a list": ({"cu_seqlens_q": [0, 3, 7]}, TypeError, "cu_seqlens_q is list, expected an int32 tensor or None"),
    "a list of lengths": ({"seqused_k": [4, 5]}, TypeError, "seqused_k is list, expected an int32 tensor or None"),
    "float32": (
        {"cu_seqlens_k": torch.tensor([0.0, 4.0, 9.0])},
        ValueError,
        r"cu_seqlens_k is torch.float32 of shape \(3,\), expected int32",
    ),
    "uint8": ({"seqused_q": ints(1, 2, dtype=torch.uint8)}, ValueError, "seqused_q is torch.uint8.*expected int32"),
    "two dimensions": (
        {"cu_seqlens_q": ints(0, 3, 7)[None]},
        ValueError,
        r"cu_seqlens_q is torch.int32 of shape \(1, 3\), expected int32 of one dimension",
    ),
    "another device": (
        {"cu_seqlens_k": ints(0, 4, 9).to("meta")},
        ValueError,
        "cu_seqlens_k is on meta but q is on cpu",
    ),
    "lengths on another device": ({"seqused_q": ints(3, 4).to("meta")}, ValueError, "seqused_q is on meta but q is on"),
    "too few for a batch": ({"cu_seqlens_q": ints(0, 7)}, ValueError, "q has 1 sequences but k has 2"),
    "no entry": ({"cu_seqlens_q": ints()}, ValueError, r"cu_seqlens_q is empty, expected \(batch \+ 1,\)"),
    "not from 0": ({"cu_seqlens_q": ints(1, 3, 7)}, ValueError, r"cu_seqlens_q is \[1, 3, 7\], expected 0 first"),
    "falling": (
        {"cu_seqlens_k": ints(0, 10, 9)},
        ValueError,
        r"cu_seqlens_k is \[0, 10, 9\].*no entry below the one before",
    ),
    "more rows than there are": (
        {"cu_seqlens_q": ints(0, 3, 8)},
        ValueError,
        "cu_seqlens_q ends at 8 but there are 7 rows",
    ),
    "lengths beyond the room": (
        {"seqused_k": ints(5, 5)},
        ValueError,
        r"seqused_k gives the lengths \[5, 5\], but there is room for \[4, 5\]",
    ),
    "a negative length": (
        {"seqused_q": ints(-1, 4)},
        ValueError,
        r"seqused_q gives the lengths \[-1, 4\], but there is room",
    ),
    "too few lengths": ({"seqused_q": ints(3)}, ValueError, "seqused_q has 1 entries, expected 2"),
    "too few offsets": (
        {"cu_seqlens_q_padded": ints(0, 3)},
        ValueError,
        "cu_seqlens_q_padded has 2 entries, expected 3",
    ),
    "offsets that are too close": (
        {"cu_seqlens_q_padded": ints(0, 2, 7)},
        ValueError,
        r"cu_seqlens_q gives the lengths \[3, 4\], but there is room for \[2, 5\]",
    ),
    "offsets beyond the end": (
        {"cu_seqlens_k_padded": ints(0, 5, 10)},
        ValueError,
        "cu_seqlens_k_padded ends at 10 but there are 9 rows",
    ),
    "offsets not from 0": (
        {"cu_seqlens_q_padded": ints(1, 4, 8)},
        ValueError,
        r"cu_seqlens_q_padded is \[1, 4, 8\], expected 0 first",
    ),
    "offsets without lengths": (
        {"q": torch.zeros(2, 7, 4, 8), "cu_seqlens_q": None, "cu_seqlens_q_padded": ints(0, 3, 7)},
        ValueError,
        "cu_seqlens_q_padded needs cu_seqlens_q",
    ),
    "packed rows without cu_seqlens": (
        {"cu_seqlens_q": None},
        ValueError,
        r"q has 3 dimensions, expected 4 without cu_seqlens_q, \(batch, seqlen, heads, head_dim\)",
    ),
    "padded rows with cu_seqlens": (
        {"k": torch.zeros(2, 9, 2, 8), "v": torch.zeros(2, 9, 2, 8)},
        ValueError,
        r"k has 4 dimensions, expected 3 with cu_seqlens_k, \(total, heads, head_dim\)",
    ),
    "keys of another length than values": ({"v": torch.zeros(8, 2, 8)}, ValueError, "k has total 9 but v has 8"),
    "mixed dtypes": ({"k": torch.zeros(9, 2, 8).half()}, TypeError, "k is torch.float16 but q is torch.float32"),
    "heads that do not divide": ({"q": torch.zeros(7, 3, 8)}, ValueError, "q has 3 heads and k has 2"),
    "a window below -1": ({"window_size": (-2, 0)}, ValueError, r"flash_attn_varlen_func: window_size is \(-2, 0\)"),
    "an alignment that is none": (
        {"causal_alignment": "top_right"},
        ValueError,
        "flash_attn_varlen_func: causal_alignment is 'top_right', expected 'bottom_right' or 'top_left'",
    ),
    "dropout": ({"dropout_p": 0.1}, NotImplementedError, "dropout_p=0.1"),
    "pages": ({"block_table": ints(0)}, NotImplementedError, "block_table="),
    "softcap": ({"softcap": 30.0}, NotImplementedError, "softcap=30.0"),
}


@pytest.mark.parametrize("grad", [False, True], ids=["inference", "training"])
@pytest.mark.parametrize("case", WRONG)
def test_a_wrong_call_names_the_argument_and_what_is_accepted(case, grad):
    change, error, text = WRONG[case]
    call = {
        "q": torch.zeros(7, 4, 8),
        "k": torch.zeros(9, 2, 8),
        "v": torch.zeros(9, 2, 8),
        "cu_seqlens_q": ints(0, 3, 7),
        "cu_seqlens_k": ints(0, 4, 9),
        **change,
    }
    call["v"].requires_grad_(grad)
    with pytest.raises(error, match=text):
        flashattn.flash_attn_varlen_func(**call)


WRONG_PADDED = {
    "a list of lengths": ({"seqused_k": [4, 5]}, TypeError, "seqused_k is list, expected an int32 tensor or None"),
    "too many lengths": ({"seqused_k": ints(1, 2, 3)}, ValueError, "seqused_k has 3 entries, expected 2"),
    "lengths beyond the room": (
        {"seqused_q": ints(5, 6)},
        ValueError,
        r"lengths \[5, 6\], but there is room for \[5\]",
    ),
    "float lengths": ({"seqused_q": torch.ones(2)}, ValueError, "seqused_q is torch.float32.*expected int32"),
}


@pytest.mark.parametrize("grad", [False, True], ids=["inference", "training"])
@pytest.mark.parametrize("case", WRONG_PADDED)
def test_wrong_lengths_of_padded_rows_are_named(case, grad):
    change, error, text = WRONG_PADDED[case]
    q, k = torch.zeros(2, 5, 4, 8, requires_grad=grad), torch.zeros(2, 9, 2, 8)
    with pytest.raises(error, match=text):
        flashattn.flash_attn_func(q, k, k, **change)


def test_batches_that_do_not_match_are_refused_for_mixed_kinds():
    q, k = torch.zeros(3, 5, 4, 8), torch.zeros(9, 2, 8)
    with pytest.raises(ValueError, match="q has 3 sequences but k has 2"):
        flashattn.flash_attn_varlen_func(q, k, k, None, ints(0, 4, 9))


@pytest.mark.parametrize(
    ("function", "shape", "text"),
    [
        ("flash_attn_varlen_qkvpacked_func", (7, 2, 4, 8), r"qkv has shape \(7, 2, 4, 8\), expected \(total, 3"),
        ("flash_attn_varlen_kvpacked_func", (2, 7, 2, 4, 8), r"kv has shape .*expected \(total, 2, heads, head_dim\)"),
    ],
)
def test_a_packed_tensor_of_another_shape_is_named(function, shape, text):
    first = () if "qkv" in function else (torch.zeros(7, 4, 8),)
    tables = (ints(0, 7),) * (1 if "qkv" in function else 2)
    with pytest.raises(ValueError, match=text):
        getattr(flashattn, function)(*first, torch.zeros(shape), *tables)


def test_only_the_asked_gradients_of_packed_rows_are_computed():
    rows_q, rows_k = strided([5, 0, 9], [6, 1, 9]), compact([7, 3, 4], slack=2)
    tensors = [x.nan_to_num(0.0) for x in draw(rows_q, rows_k, torch.float32, (2, 1), (8, 8))[:3]]
    full = [x.requires_grad_() for x in tensors]
    want = torch.autograd.grad(attend(*full, rows_q, rows_k)[0].sum(), full)
    for needed in product([False, True], repeat=3):
        if any(needed):
            given = [x.detach().requires_grad_(need) for x, need in zip(full, needed, strict=True)]
            attend(*given, rows_q, rows_k)[0].sum().backward()
            for x, grad, need in zip(given, want, needed, strict=True):
                assert x.grad is None if not need else torch.equal(x.grad, grad)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("kind", KINDS)
def test_inference_gives_the_same_bits_and_repeats_them(kind, device):
    rows = rows_of_kind(kind, [40, 0, 70])
    dtype = {"cpu": torch.float32, "cuda": torch.float16}[device]
    tensors = draw(rows, rows, dtype, (4, 2), (64, 64), device)
    first = ours(*tensors, rows, rows, causal=True, deterministic=True)
    for _ in range(3):
        assert same_bits(first, ours(*tensors, rows, rows, causal=True))
    q, k, v = tensors[:3]
    tables = {**rows.tables("q", device), **rows.tables("k", device)}
    packed = rows.cu_seqlens is not None
    function = flashattn.flash_attn_varlen_func if packed else flashattn.flash_attn_func
    with torch.no_grad():
        out = function(q.requires_grad_(), k, v, causal=True, **tables)
    assert torch.equal(out, first.out) and not out.requires_grad


def test_gradients_may_be_expanded_transposed_or_half_of_something():
    rows = strided([5, 9, 20], [6, 9, 22])
    q, k, v, *_ = draw(rows, rows, torch.float32, (4, 2), (16, 16))

    def gradients(consume):
        leaves = [x.detach().requires_grad_() for x in (q, k, v)]
        out, _ = attend(*leaves, rows, rows, causal=True)
        return torch.autograd.grad(consume(out), leaves)

    weights = torch.randn(37, 4, 16)
    for consume, dout in (
        (lambda out: out.sum(), torch.ones(37, 4, 16)),
        (lambda out: (out.transpose(0, 1).contiguous() * weights.transpose(0, 1)).sum(), weights),
        (lambda out: (torch.cat([out, out.detach()], 1)[:, :4].transpose(1, 2) * weights.mT).sum(), weights),
        (lambda out: (torch.stack([out, out], -1)[..., 0] * weights).sum(), weights),
        (lambda out: (out.double() * weights).sum(), weights),
    ):
        want = gradients(lambda out, dout=dout: (out * dout).sum())
        assert all(torch.equal(a, b) for a, b in zip(gradients(consume), want, strict=True))


@pytest.mark.parametrize("device", DEVICES)
def test_lse_and_its_gradient_may_be_strided(device):
    rows = compact([5, 9, 20])
    dtype = {"cpu": torch.float32, "cuda": torch.float16}[device]
    q, k, v, dout, dlse = draw(rows, rows, dtype, (4, 2), (64, 64), device)
    tables = {**rows.tables("q", device), **rows.tables("k", device)}
    out, lse = torch.ops.flashattn.attn_fwd(q, k, v, causal=True, **tables)
    want = torch.ops.flashattn.attn_bwd(dout, q, k, v, out, lse, dlse, causal=True, **tables)
    wide, transposed = torch.stack([lse, lse + 1], -1)[..., 0], dlse.T.contiguous().T
    got = torch.ops.flashattn.attn_bwd(dout, q, k, v, out, wide, transposed, causal=True, **tables)
    assert all(torch.equal(a, b) for a, b in zip(got, want, strict=True))


def test_double_backward_raises():
    rows = compact([2, 3])
    q, k, v, *_ = draw(rows, rows, torch.float32, (1, 1), (8, 8))
    q.requires_grad_()
    (grad,) = torch.autograd.grad(attend(q, k, v, rows, rows)[0].sum(), q, create_graph=True)
    with pytest.raises(NotImplementedError, match="no second derivative"):
        grad.square().sum().backward()


def test_transforms_are_refused():
    rows = compact([2, 3])
    q, k, v, *_ = draw(rows, rows, torch.float32, (1, 1), (8, 8))
    with pytest.raises(NotImplementedError, match=r"torch\.func transforms"):
        torch.vmap(lambda x: attend(x, k, v, rows, rows)[0])(torch.stack([q, q]))


def test_autocast_changes_nothing():
    rows_q, rows_k = compact([12, 8]), strided([5, 15], [7, 16])
    tensors = draw(rows_q, rows_k, torch.float32, (2, 1), (16, 16))
    want = ours(*tensors, rows_q, rows_k)
    with torch.autocast("cpu", torch.bfloat16):
        assert same_bits(want, ours(*tensors, rows_q, rows_k))


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize(("kind_q", "kind_k"), [(kind, kind) for kind in KINDS] + [("compact", "padded")])
def test_ops_pass_opcheck(kind_q, kind_k, device):
    rows_q, rows_k = rows_of_kind(kind_q, [3, 9], 1), rows_of_kind(kind_k, [11, 6], 2)
    q, k, v, dout, dlse = (x.nan_to_num(0.0) for x in draw(rows_q, rows_k, torch.float32, (2, 1), (16, 8), device))
    dlse = dlse.contiguous()
    tables = {**rows_q.tables("q", device), **rows_k.tables("k", device)}
    masks = {"causal": True, "window_left": 4, "top_left": True}
    ops = torch.ops.flashattn
    opcheck(ops.attention.default, tuple(x.clone().requires_grad_() for x in (q, k, v)), {**masks, **tables})
    opcheck(ops.attn_fwd.default, (q, k, v), {**masks, **tables})
    opcheck(ops.attn_fwd.inference, (q, k, v), {**masks, **tables})
    out, lse = ops.attn_fwd(q, k, v, **masks, **tables)
    opcheck(ops.attn_bwd.default, (dout, q, k, v, out, lse, dlse), {**masks, **tables})
    for wanted in ({"want_dq": False}, {"want_dkdv": False}):
        opcheck(ops.attn_bwd.default, (dout, q, k, v, out, lse, None), {**wanted, **masks, **tables})


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("kind", KINDS)
def test_meta_tensors_have_the_shapes_strides_and_dtypes_of_real_ones(kind, device):
    rows_q, rows_k = rows_of_kind(kind, [3, 9, 20], 1), rows_of_kind("strided", [11, 6, 0], 2)
    ops = torch.ops.flashattn

    def run(where):
        tensors = draw(rows_q, rows_k, torch.float16, (4, 2), (16, 8), device)
        q, k, v, dout, dlse = (x.to(where) for x in tensors)
        tables = {**rows_q.tables("q", where), **rows_k.tables("k", where)}
        out, lse = ops.attn_fwd(q, k, v, causal=True, **tables)
        inference = ops.attn_fwd.inference(q, k, v, causal=True, **tables)
        return out, lse, inference, *ops.attn_bwd(dout, q, k, v, out, lse, dlse, causal=True, **tables)

    for a, b in zip(run(device), run("meta"), strict=True):
        assert a.shape == b.shape and a.stride() == b.stride() and a.dtype == b.dtype


@pytest.mark.parametrize("device", DEVICES)
def test_varlen_compiles_once_for_any_lengths_and_number_of_sequences(device):
    torch._dynamo.reset()
    counter, compiled_so_far = CompileCounterWithBackend("aot_eager"), []

    def attention(q, k, v, cu_q, cu_k, used):
        return flashattn.flash_attn_varlen_func(
            q * 1.0, k, v, cu_q, cu_k, seqused_k=used, causal=True, window_size=(20, 0), return_lse=True
        )

    compiled = torch.compile(attention, fullgraph=True, dynamic=True, backend=counter)
    # No two sizes of the first call are equal, or Dynamo would take them for one.
    for lengths in ([5, 9, 8], [3, 20, 30, 5], [64, 2, 7, 40, 11, 3]):
        rows_q, rows_k = compact(lengths), partly_used(lengths[::-1], [n + 2 for n in lengths[::-1]])
        dtype = {"cpu": torch.float32, "cuda": torch.float16}[device]
        q, k, v, dout, dlse = draw(rows_q, rows_k, dtype, (10, 5), (64, 64), device)
        q, k, v = (x.nan_to_num(0.0).requires_grad_() for x in (q, k, v))
        tables = {**rows_q.tables("q", device), **rows_k.tables("k", device)}
        results = [f(q, k, v, *tables.values()) for f in (attention, compiled)]
        compiled_so_far.append(counter.frame_count)
        grads = [torch.autograd.grad(result, (q, k, v), (dout, dlse)) for result in results]
        for a, b in zip((*results[0], *grads[0]), (*results[1], *grads[1]), strict=True):
            assert torch.equal(a, b)
    assert len(set(compiled_so_far)) == 1


def test_a_padded_batch_compiles_with_its_lengths():
    torch._dynamo.reset()
    counter, compiled_so_far = CompileCounterWithBackend("aot_eager"), []
    compiled = torch.compile(
        lambda q, k, used: flashattn.flash_attn_func(
            q, k, k, seqused_q=used, seqused_k=used, causal_alignment="top_left"
        ),
        fullgraph=True,
        dynamic=True,
        backend=counter,
    )
    for batch, seqlen in ((3, 9), (4, 30), (6, 12)):
        q, k = torch.randn(2, batch, seqlen, 2, 8, requires_grad=True)
        used = torch.arange(batch, dtype=torch.int32)
        want = flashattn.flash_attn_func(q, k, k, seqused_q=used, seqused_k=used, causal_alignment="top_left")
        got = compiled(q, k, used)
        compiled_so_far.append(counter.frame_count)
        assert torch.equal(got, want)
        for a, b in zip(*(torch.autograd.grad(x.sum(), (q, k)) for x in (got, want)), strict=True):
            assert torch.equal(a, b)
    assert len(set(compiled_so_far)) == 1


@pytest.mark.parametrize("offset", [-1, 1])
def test_the_oracle_sees_a_mask_that_is_off_by_one(offset, monkeypatch):
    import varlen_oracle

    rows = strided([5, 9, 20], [6, 9, 22])
    check(rows, rows, window_size=(3, 2))
    monkeypatch.setattr(
        varlen_oracle,
        "visible",
        lambda m, n, window_size, **rest: visible(m, n, window_size=(window_size[0] + offset, window_size[1]), **rest),
    )
    with pytest.raises(AssertionError, match=r"is off by|not 0 where|assert"):
        check(rows, rows, window_size=(3, 2))


def test_the_oracle_sees_a_row_that_is_read_from_a_neighbour():
    rows, other = strided([5, 9, 20], [6, 9, 22]), strided([5, 9, 20], [6, 10, 21])
    q, k, v, dout, dlse = (x.nan_to_num(0.5) for x in draw(rows, rows, torch.float64, (2, 1), (8, 8)))
    got, want = ours(q, k, v, dout, dlse, rows, other), expected(q, k, v, dout, dlse, rows, rows, torch.float64)
    assert not torch.allclose(got.out, want.out)


def test_the_formula_that_everything_is_compared_with_is_torch_s_attention():
    rows_q, rows_k = compact([6, 9]), compact([8, 5])
    q, k, v, dout, _ = draw(rows_q, rows_k, torch.float64, (4, 2), (8, 8))
    found = expected(q, k, v, dout, None, rows_q, rows_k, torch.float64, softmax_scale=0.3, window_size=(3, 1))
    for at_q, at_k in zip(rows_q.index, rows_k.index, strict=True):
        m, n = at_q.stop - at_q.start, at_k.stop - at_k.start
        mask = torch.tensor([[-3 <= j - (i + n - m) <= 1 for j in range(n)] for i in range(m)])
        seen = mask.any(1)
        wide = (x[at_k].repeat_interleave(2, 1).transpose(0, 1) for x in (k, v))
        want = torch.nn.functional.scaled_dot_product_attention(
            q[at_q].transpose(0, 1), *wide, attn_mask=mask, scale=0.3
        )
        torch.testing.assert_close(found.out[at_q][seen], want.transpose(0, 1)[seen])
        assert (found.out[at_q][~seen] == 0).all()
