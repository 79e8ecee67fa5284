"""The same mathematics in plain torch: what runs on the CPU, and what the kernels are compared with."""

from __future__ import annotations

import functools

import torch


def _in_own_precision(function):
    """The function with autocast off: it chooses its dtypes itself."""

    @functools.wraps(function)
    def run(first, *args, **kwargs):
        with torch.autocast(first.device.type, enabled=False):
            return function(first, *args, **kwargs)

    return run


def visible(seqlen_q: int, seqlen_k: int, causal: bool, device=None) -> torch.Tensor:
    """Whether query i sees key j, [seqlen_q, seqlen_k]: causal lets it see j <= i + seqlen_k - seqlen_q."""
    keep = torch.ones(seqlen_q, seqlen_k, dtype=torch.bool, device=device)
    return keep.tril(seqlen_k - seqlen_q) if causal else keep


@_in_own_precision
def attention(q, k, v, softmax_scale: float | None = None, causal: bool = False):
    """softmax(scale * q k^T) v over all keys that a query sees.

    q [batch, seqlen_q, heads_q, head_dim], k [batch, seqlen_k, heads_k, head_dim], v [.., head_dim_v]; heads_q is a
    multiple of heads_k, and query head h reads key head h // (heads_q / heads_k). softmax_scale defaults to
    head_dim ** -0.5. Returns out [batch, seqlen_q, heads_q, head_dim_v] in q's dtype and lse [batch, heads_q,
    seqlen_q], natural log, float32 (float64 for float64). A row without a key gives out 0, lse -inf. Differentiable.
    """
    scale = q.shape[-1] ** -0.5 if softmax_scale is None else softmax_scale
    work = torch.float64 if q.dtype == torch.float64 else torch.float32
    group = q.shape[2] // k.shape[2]
    qh = q.transpose(1, 2).to(work)
    kh = k.transpose(1, 2).to(work).repeat_interleave(group, 1)
    vh = v.transpose(1, 2).to(work).repeat_interleave(group, 1)
    s = qh @ kh.transpose(-1, -2) * scale  # [B, H, M, N]
    keep = visible(q.shape[1], k.shape[1], causal, q.device)
    seen = keep.any(-1)
    # A row of -inf has no softmax: give it zeros instead, and take the row out of the result.
    s = s.masked_fill(~keep, float("-inf")).masked_fill(~seen[:, None], 0.0)
    p = torch.softmax(s, -1).masked_fill(~keep, 0.0)
    lse = torch.logsumexp(s, -1).masked_fill(~seen, float("-inf"))
    return (p @ vh).transpose(1, 2).to(q.dtype).contiguous(), lse


@_in_own_precision
def attention_backward(dout, q, k, v, out, lse, dlse=None, softmax_scale: float | None = None, causal: bool = False):
    """Gradients dq, dk, dv of `attention`, from what it returned, by the formula and without autograd."""
    scale = q.shape[-1] ** -0.5 if softmax_scale is None else softmax_scale
    work = lse.dtype
    batch, seqlen_k, heads_k, _ = k.shape
    group = q.shape[2] // heads_k
    qh, doh, oh = (x.transpose(1, 2).to(work) for x in (q, dout, out))
    kh, vh = (x.transpose(1, 2).to(work).repeat_interleave(group, 1) for x in (k, v))
    keep = visible(q.shape[1], seqlen_k, causal, q.device)
    s = (qh @ kh.transpose(-1, -2) * scale).masked_fill(~keep, float("-inf"))
    # A row without a key has lse -inf; its weights are masked out.
    p = (s - lse[..., None]).clamp(max=0.0).exp().masked_fill(~keep, 0.0)
    delta = (doh * oh).sum(-1)
    if dlse is not None:
        delta = delta - dlse
    ds = p * (doh @ vh.transpose(-1, -2) - delta[..., None])

    def grouped(x):
        return x.reshape(batch, heads_k, group, seqlen_k, x.shape[-1]).sum(2)

    grads = (ds @ kh * scale, grouped(ds.transpose(-1, -2) @ qh * scale), grouped(p.transpose(-1, -2) @ doh))
    return tuple(x.transpose(1, 2).to(q.dtype).contiguous() for x in grads)
