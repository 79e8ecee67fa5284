"""TransformerEngine's layouts that are not paged: each is one of our forms, without a copy."""

from __future__ import annotations

import pytest
import torch
from te_layouts import HEADS_FIRST, LAYOUTS, build, views
from varlen_oracle import attend, compare, expected, one_thread, ours, same_bits

__all__ = ["one_thread"]
DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]
MASKS = {"full": {}, "causal": {"causal": True}, "a window": {"window_size": (6, 2)}}


def test_there_are_twenty_layouts():
    assert len(set(LAYOUTS)) == 20 and len({*LAYOUTS, *HEADS_FIRST}) == 25


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("mask", MASKS)
@pytest.mark.parametrize("layout", LAYOUTS + HEADS_FIRST)
def test_a_layout_gives_the_bits_of_contiguous_tensors(layout, mask, device):
    dtype, dim = {"cpu": (torch.float32, 16), "cuda": (torch.float16, 64)}[device]
    built = build(layout, dtype, dim, device=device)
    start, end = built.buffer.data_ptr(), built.buffer.data_ptr() + built.buffer.nbytes
    for tensor in (built.q, built.k, built.v):
        assert start <= tensor.data_ptr() < end and tensor.stride(-1) == 1
    rows = built.rows_q, built.rows_k
    dout = torch.randn(built.q.shape, device=device).to(dtype)
    dlse = torch.randn(attend(built.q, built.k, built.v, *rows)[1].shape, device=device)
    got = ours(built.q, built.k, built.v, dout, dlse, *rows, **MASKS[mask])
    copies = [x.contiguous() for x in (built.q, built.k, built.v)]
    assert same_bits(got, ours(*copies, dout, dlse, *rows, **MASKS[mask]))
    compare(got, *(expected(*copies, dout, dlse, *rows, t, **MASKS[mask]) for t in (torch.float64, dtype)))


@pytest.mark.parametrize("layout", LAYOUTS + HEADS_FIRST)
def test_gradients_arrive_where_the_values_lie(layout):
    """The buffer gets the gradients of its three views, and zeros in its gaps."""
    built = build(layout)
    buffer = built.buffer.detach().requires_grad_()
    q, k, v = views(layout, buffer, built)
    rows = built.rows_q, built.rows_k
    out, lse = attend(q, k, v, *rows, causal=True)
    dout, dlse = torch.randn_like(out), torch.randn_like(lse)
    (got,) = torch.autograd.grad((out, lse), buffer, (dout, dlse))
    want = ours(built.q, built.k, built.v, dout, dlse, *rows, causal=True)
    for view, grad in zip(views(layout, got, built), (want.dq, want.dk, want.dv), strict=True):
        assert torch.equal(view, grad)
    assert (got[built.buffer.isnan()] == 0).all()
