"""The kernels in Triton's interpreter, against float64, on ragged lengths and with NaN in what they write to."""

from __future__ import annotations

import json

import pytest
import torch

import flashattn
from flashattn import launch, reference, settings

LOW = [torch.float16, torch.bfloat16, torch.float32]
LIMIT = {torch.float16: 4e-3, torch.bfloat16: 3e-2, torch.float32: 1e-5}


@pytest.fixture(autouse=True)
def nan_filled_outputs(monkeypatch):
    assert launch.interpreting(), "run with TRITON_INTERPRET=1"

    def filled(make):
        def made(*args, **kwargs):
            tensor = make(*args, **kwargs)
            return tensor.fill_(float("nan")) if tensor.is_floating_point() else tensor

        return made

    for owner, name in ((torch, "empty"), (torch, "empty_like"), (torch.Tensor, "new_empty")):
        monkeypatch.setattr(owner, name, filled(getattr(owner, name)))


def check(dtype, heads_q, heads_k, seqlen_q, seqlen_k, dim, dim_v=None, softmax_scale=None, causal=False):
    torch.manual_seed(0)
    q = torch.randn(1, seqlen_q, heads_q, dim).to(dtype).requires_grad_()
    k = torch.randn(1, seqlen_k, heads_k, dim).to(dtype).requires_grad_()
    v = torch.randn(1, seqlen_k, heads_k, dim_v or dim).to(dtype).requires_grad_()
    exact = [x.detach().double().requires_grad_() for x in (q, k, v)]
    out, lse = flashattn.flash_attn_func(q, k, v, softmax_scale=softmax_scale, causal=causal, return_lse=True)
    want, want_lse = reference.attention(*exact, softmax_scale, causal)
    dout = torch.randn_like(want)
    got = (out, *torch.autograd.grad(out, (q, k, v), dout.to(dtype)))
    right = (want, *torch.autograd.grad(want, exact, dout.to(dtype).double()))
    for name, a, b in zip(("out", "dq", "dk", "dv"), got, right, strict=True):
        assert (a.double() - b).abs().max() <= LIMIT[dtype] * b.abs().max().clamp(min=1), name
    assert torch.equal(lse.isinf(), want_lse.isinf())
    finite = ~want_lse.isinf()
    torch.testing.assert_close(lse[finite].double(), want_lse[finite], rtol=1e-5, atol=1e-5)


@pytest.mark.newest
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("dtype", LOW, ids=str)
def test_kernels_compute_attention_and_its_gradients(dtype, causal):
    check(dtype, 2, 1, 65, 100, 64, causal=causal)


@pytest.mark.parametrize(
    ("seqlen_q", "seqlen_k"), [(1, 1), (1, 50), (50, 1), (17, 33), (33, 17), (50, 8), (129, 127), (128, 128)]
)
def test_causal_at_ragged_lengths(seqlen_q, seqlen_k):
    check(torch.float32, 1, 1, seqlen_q, seqlen_k, 16, causal=True)
    check(torch.float16, 1, 1, seqlen_q, seqlen_k, 16, causal=True)


@pytest.mark.parametrize(("dim", "dim_v"), [(1, 1), (20, 23), (24, 152), (120, 8), (96, 96), (256, 40)])
def test_head_dims_that_are_not_powers_of_two(dim, dim_v):
    check(torch.float16, 1, 1, 40, 70, dim, dim_v)


@pytest.mark.parametrize(("heads_q", "heads_k"), [(6, 2), (3, 1), (7, 7)])
def test_grouped_heads(heads_q, heads_k):
    check(torch.float32, heads_q, heads_k, 20, 40, 16)


@pytest.mark.parametrize("scale", [0.0, -0.125])
def test_scale_zero_and_negative(scale):
    check(torch.float32, 1, 1, 70, 70, 16, softmax_scale=scale, causal=True)


def test_huge_scores_do_not_overflow():
    q = torch.full((1, 40, 1, 64), 133120.0, dtype=torch.bfloat16, requires_grad=True)
    out = flashattn.flash_attn_func(q, q, q, causal=True)
    assert (out == 133120).all()
    assert torch.isfinite(torch.autograd.grad(out.sum(), q)[0]).all()


@pytest.mark.parametrize("block", [16, 32, 64, 128])
def test_rows_without_a_key_do_not_depend_on_tiles(block, tmp_path, monkeypatch):
    tile = {"block_m": block, "block_n": 144 - block if block == 128 else 64, "num_warps": 4, "num_stages": 1}
    names = ("attn_fwd", "bwd_preprocess", "bwd_dkdv", "bwd_dq")
    (tmp_path / "tiles.json").write_text(json.dumps(dict.fromkeys(names, tile)))
    monkeypatch.setenv("FLASHATTN_TILES", str(tmp_path / "tiles.json"))
    settings.reset()
    launch.reset()
    try:
        q, k, v = (torch.randn(1, n, 1, 24).requires_grad_() for n in (50, 8, 8))
        out, lse = flashattn.flash_attn_func(q, k, v, causal=True, return_lse=True)
        dq = torch.autograd.grad(out.sum(), q)[0]
        assert (out[:, :42] == 0).all() and (dq[:, :42] == 0).all() and (lse[..., :42] == float("-inf")).all()
        check(torch.float32, 2, 1, 50, 8, 24, causal=True)
        check(torch.float32, 1, 1, 150, 140, 24, causal=True)
    finally:
        monkeypatch.undo()
        settings.reset()
        launch.reset()


def test_a_planted_fault_is_seen(monkeypatch):
    """A mask that is off by one row must not pass."""
    from flashattn import reference as module

    right = module.visible
    monkeypatch.setattr(module, "visible", lambda m, n, *mask, device: right(m, n + 1, *mask, device=device)[:, :n])
    with pytest.raises(AssertionError):
        check(torch.float32, 1, 1, 33, 33, 16, causal=True)


def test_gradient_of_lse_may_start_anywhere(monkeypatch):
    """It is not promised to be aligned to a kernel that was told so."""
    seen, kernels = [], launch._kernels
    monkeypatch.setattr(launch, "_kernels", lambda facts, device: seen.append(facts[5]) or kernels(facts, device))
    q, k, v = (torch.randn(1, 32, 2, 16) for _ in range(3))
    out, lse = torch.ops.flashattn.attn_fwd(q, k, v)
    dlse = torch.randn(lse.numel() + 1)
    grads = [
        torch.ops.flashattn.attn_bwd(out, q, k, v, out, lse, given)
        for given in (dlse[1:].view(lse.shape), dlse[1:].clone().view(lse.shape))
    ]
    assert all(torch.equal(a, b) for a, b in zip(*grads, strict=True))
    assert seen == [True, False, True]
