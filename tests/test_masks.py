"""Causal masks and windows: which key a query sees, forward and backward, on dense tensors."""

from __future__ import annotations

from itertools import combinations, product

import pytest
import torch
from varlen_oracle import check, dense, draw, one_thread, ours, padded, same_bits

import flashattn

__all__ = ["one_thread"]
DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]
ALIGNMENTS = ["bottom_right", "top_left"]
LENGTHS = [(40, 40), (33, 17), (17, 33), (1, 50), (50, 1), (5, 130), (130, 131), (1, 1)]
WINDOWS = [(5, 0), (5, 7), (0, 0), (0, 7), (-1, 3), (3, -1), (0, -1), (-1, 0), (64, 64), (1000, 1000), (None, 3)]


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("alignment", ALIGNMENTS)
@pytest.mark.parametrize(("seqlen_q", "seqlen_k"), LENGTHS)
def test_causal_is_aligned_as_asked_forward_and_backward(seqlen_q, seqlen_k, alignment, device):
    rows = dense(2, seqlen_q), dense(2, seqlen_k)
    for dtype in (torch.float16, torch.float32):
        check(*rows, dtype=dtype, device=device, heads=(4, 2), causal=True, causal_alignment=alignment)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("alignment", ALIGNMENTS)
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("window", WINDOWS, ids=str)
def test_a_window_shows_its_keys_and_no_other(window, causal, alignment, device):
    for seqlen_q, seqlen_k in LENGTHS:
        check(
            dense(1, seqlen_q), dense(1, seqlen_k), device=device, heads=(4, 2), causal=causal, window_size=window,
            causal_alignment=alignment,
        )  # fmt: skip


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("alignment", ALIGNMENTS)
@pytest.mark.parametrize(("heads_q", "heads_k"), [(6, 2), (14, 2), (12, 4), (16, 1), (7, 7)])
def test_windows_and_grouped_heads_together(heads_q, heads_k, alignment, device):
    for window, causal in (((20, 0), False), ((20, 9), False), ((20, 9), True)):
        check(
            padded([77, 30, 0]), padded([60, 77, 9]), device=device, heads=(heads_q, heads_k), causal=causal,
            window_size=window, causal_alignment=alignment,
        )  # fmt: skip


def weights(seqlen_q: int, seqlen_k: int, **options):
    """The weights of equal scores: row i of out tells which keys query i sees."""
    q, k = torch.zeros(1, seqlen_q, 1, seqlen_k), torch.zeros(1, seqlen_k, 1, seqlen_k)
    v = torch.eye(seqlen_k)[None, :, None]
    return flashattn.flash_attn_func(q, k, v, **options)[0, :, 0]


def test_a_causal_window_of_three_shows_a_query_itself_and_three_before_it():
    want = torch.tensor([[1 / min(i + 1, 4) if i - 3 <= j <= i else 0.0 for j in range(8)] for i in range(8)])
    torch.testing.assert_close(weights(8, 8, causal=True, window_size=(3, 0)), want)
    torch.testing.assert_close(weights(8, 8, causal=True, window_size=(3, -1)), want)
    torch.testing.assert_close(weights(8, 8, causal=True, window_size=(3, 5)), want)


def test_a_window_of_one_and_two_shows_four_keys():
    seen = weights(8, 8, window_size=(1, 2)) > 0
    assert seen.tolist() == [[i - 1 <= j <= i + 2 for j in range(8)] for i in range(8)]


def test_with_one_query_bottom_right_sees_all_keys_and_top_left_the_first():
    assert (weights(1, 5, causal=True) > 0).tolist() == [[True] * 5]
    assert (weights(1, 5, causal=True, causal_alignment="top_left") > 0).tolist() == [[True] + [False] * 4]


@pytest.mark.parametrize("alignment", ALIGNMENTS)
def test_an_alignment_moves_windows_too(alignment):
    seen = weights(3, 6, window_size=(1, 0), causal_alignment=alignment) > 0
    shift = 3 if alignment == "bottom_right" else 0
    assert seen.tolist() == [[i + shift - 1 <= j <= i + shift for j in range(6)] for i in range(3)]


@pytest.mark.parametrize("device", DEVICES)
def test_a_bound_of_zero_is_a_bound(device):
    dtype = {"cpu": torch.float32, "cuda": torch.float16}[device]
    rows = dense(2, 200)
    q, k, v, dout, dlse = draw(rows, rows, dtype, (2, 2), (64, 64), device)
    got = ours(q, k, v, dout, dlse, rows, rows, window_size=(0, 0))
    assert torch.equal(got.out, v) and torch.equal(got.dv, dout)
    scores = (q.double() * k.double()).sum(-1).transpose(1, 2) / 8
    torch.testing.assert_close(got.lse.double(), scores, rtol=1e-5, atol=1e-5)
    causal = ours(q, k, v, dout, dlse, rows, rows, causal=True)
    assert same_bits(causal, ours(q, k, v, dout, dlse, rows, rows, window_size=(-1, 0)))
    assert same_bits(causal, ours(q, k, v, dout, dlse, rows, rows, window_size=(None, 0)))


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("causal", [False, True])
def test_no_bound_is_the_same_bits_as_no_window(causal, device):
    dtype = {"cpu": torch.float32, "cuda": torch.float16}[device]
    rows = dense(2, 130), dense(2, 77)
    tensors = draw(*rows, dtype, (4, 2), (64, 64), device)
    want = ours(*tensors, *rows, causal=causal)
    for window in ((-1, -1), (None, None), (-1, None), [-1, -1], (None, -1)):
        assert same_bits(want, ours(*tensors, *rows, causal=causal, window_size=window))
    if causal:
        for right in (0, 7, -1):
            assert same_bits(want, ours(*tensors, *rows, causal=True, window_size=(-1, right)))


@pytest.mark.parametrize("device", DEVICES)
def test_equal_lengths_make_the_alignments_the_same_bits(device):
    dtype = {"cpu": torch.float32, "cuda": torch.float16}[device]
    rows = dense(2, 130)
    tensors = draw(rows, rows, dtype, (4, 2), (64, 64), device)
    for masks in ({"causal": True}, {"window_size": (9, 4)}, {}):
        top_left = ours(*tensors, rows, rows, causal_alignment="top_left", **masks)
        assert same_bits(top_left, ours(*tensors, rows, rows, **masks))


OPTIONS = {
    "causal": {"causal": True},
    "window": {"window_size": (20, 5)},
    "top left": {"causal_alignment": "top_left"},
    "scale": {"softmax_scale": 0.4},
    "used queries": {"seqused_q": [30, 50]},
    "used keys": {"seqused_k": [70, 20]},
}


@pytest.mark.parametrize("device", DEVICES)
def test_every_option_and_pair_of_options_reaches_the_backward(device):
    for names in (*combinations(OPTIONS, 1), *combinations(OPTIONS, 2)):
        options = {key: value for name in names for key, value in OPTIONS[name].items()}
        used_q, used_k = options.pop("seqused_q", None), options.pop("seqused_k", None)
        rows_q = dense(2, 50) if used_q is None else padded(used_q, 50)
        rows_k = dense(2, 70) if used_k is None else padded(used_k, 70)
        got = check(rows_q, rows_k, device=device, **options)
        if names == ("top left",):
            continue
        full = (dense(2, 50), dense(2, 70))
        dtype = {"cpu": torch.float32, "cuda": torch.float16}[device]
        dim = {"cpu": 16, "cuda": 64}[device]
        plain = ours(*draw(*full, dtype, (2, 1), (dim, dim), device), *full)
        for name in ("out", "lse", "dq", "dk", "dv"):
            assert not torch.equal(getattr(got, name), getattr(plain, name)), (names, name)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("deterministic", [False, True])
def test_twenty_runs_give_the_same_bits(deterministic, device):
    dtype = {"cpu": torch.float32, "cuda": torch.bfloat16}[device]
    rows = dense(2, 130), dense(2, 77)
    tensors = draw(*rows, dtype, (4, 2), (64, 64), device)
    options = {"window_size": (40, 10), "deterministic": deterministic}
    first = ours(*tensors, *rows, **options)
    before = torch.are_deterministic_algorithms_enabled()
    torch.use_deterministic_algorithms(deterministic)
    try:
        assert all(same_bits(first, ours(*tensors, *rows, **options)) for _ in range(19))
    finally:
        torch.use_deterministic_algorithms(before)


@pytest.mark.parametrize("device", DEVICES)
def test_scales_of_zero_and_below_leave_masks_alone(device):
    for scale, causal in product((0.0, -0.125), (False, True)):
        check(dense(2, 70), dense(2, 50), device=device, softmax_scale=scale, causal=causal, window_size=(9, 4))


WRONG = {
    "below -1": ({"window_size": (-2, 0)}, r"window_size is \(-2, 0\), expected \(left, right\), each -1, None or at"),
    "below -1 on the right": ({"window_size": (0, -5)}, r"window_size is \(0, -5\)"),
    "one number": ({"window_size": 5}, r"window_size is 5, expected \(left, right\)"),
    "three numbers": ({"window_size": (1, 2, 3)}, r"window_size is \(1, 2, 3\)"),
    "fractions": ({"window_size": (1.5, 2)}, r"window_size is \(1.5, 2\)"),
    "text": ({"window_size": "ab"}, "window_size is 'ab'"),
    "a corner that is none": (
        {"causal_alignment": "top-left"},
        "causal_alignment is 'top-left', expected 'bottom_right' or 'top_left'",
    ),
    "no corner": ({"causal_alignment": None}, "causal_alignment is None"),
}


@pytest.mark.parametrize("case", WRONG)
def test_a_wrong_mask_names_the_argument_and_what_is_accepted(case):
    options, text = WRONG[case]
    x = torch.zeros(1, 4, 1, 8)
    with pytest.raises(ValueError, match=f"flash_attn_func: {text}"):
        flashattn.flash_attn_func(x, x, x, **options)


@pytest.mark.parametrize("name", ["window_left", "window_right"])
def test_the_ops_refuse_bounds_below_minus_one(name):
    x = torch.zeros(1, 4, 1, 8)
    with pytest.raises(ValueError, match=f"{name} is -2, expected -1"):
        torch.ops.flashattn.attn_fwd(x, x, x, **{name: -2})


@pytest.mark.parametrize("device", DEVICES)
def test_any_integer_may_be_a_bound(device):
    numpy = pytest.importorskip("numpy")
    dtype = {"cpu": torch.float32, "cuda": torch.float16}[device]
    rows = dense(1, 20)
    q, k, v, *_ = draw(rows, rows, dtype, (2, 1), (64, 64), device)
    want = flashattn.flash_attn_func(q, k, v, window_size=(3, 1))
    for window in ((numpy.int64(3), numpy.int32(1)), [3, True], torch.tensor([3, 1]), (3, 1)):
        assert torch.equal(flashattn.flash_attn_func(q, k, v, window_size=window), want)


def test_bounds_beyond_int32_see_everything():
    rows = dense(1, 20), dense(1, 30)
    tensors = draw(*rows, torch.float32, (2, 1), (8, 8))
    want = ours(*tensors, *rows)
    assert same_bits(want, ours(*tensors, *rows, window_size=(2**31, 2**40)))
