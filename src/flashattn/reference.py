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


def visible(
    seqlen_q: int, seqlen_k: int, causal: bool, window_left: int = -1, window_right: int = -1, top_left: bool = False,
    device=None,
) -> torch.Tensor:  # fmt: skip
    """Whether query i sees key j, [seqlen_q, seqlen_k].

    With i counted so that the last query is at the last key (or the first at the first: top_left), it sees
    i - window_left <= j <= i + window_right, a bound of -1 being none; causal: j <= i.
    """
    i = torch.arange(seqlen_q, device=device)[:, None] + (0 if top_left else seqlen_k - seqlen_q)
    j = torch.arange(seqlen_k, device=device)[None, :]
    keep = torch.ones(seqlen_q, seqlen_k, dtype=torch.bool, device=device)
    if causal:
        keep &= j <= i
    if window_left >= 0:
        keep &= j >= i - window_left
    if window_right >= 0:
        keep &= j <= i + window_right
    return keep


@_in_own_precision
def attention(
    q, k, v, softmax_scale: float | None = None, causal: bool = False, window_left: int = -1, window_right: int = -1,
    top_left: bool = False, *tables,
):  # fmt: skip
    """softmax(scale * q k^T) v over all keys that a query sees.

    q [batch, seqlen_q, heads_q, head_dim], k [batch, seqlen_k, heads_k, head_dim], v [.., head_dim_v]; heads_q is a
    multiple of heads_k, and query head h reads key head h // (heads_q / heads_k). softmax_scale defaults to
    head_dim ** -0.5; the masks are those of `visible`. Returns out [batch, seqlen_q, heads_q, head_dim_v] in q's dtype
    and lse [batch, heads_q, seqlen_q], natural log, float32 (float64 for float64). A row without a key gives out 0,
    lse -inf. Differentiable.

    tables: cu_seqlens_q, cu_seqlens_k, seqused_q, seqused_k, cu_seqlens_q_padded, cu_seqlens_k_padded, each a tensor or
    None. With cu_seqlens, q (or k and v) is [total, heads, head_dim] and lse [heads_q, total]. Rows that no sequence
    uses are not read; their out is 0, their lse -inf.
    """
    masks = (softmax_scale, causal, window_left, window_right, top_left)
    if not any(table is not None for table in tables):
        return _dense(q, k, v, *masks)
    out = q.new_zeros((*q.shape[:-1], v.shape[-1]))
    lse = torch.full((*q.shape[:-3], q.shape[-2], q.shape[-3]), float("-inf"), dtype=_work(q), device=q.device)
    for rows_q, rows_k in _sequences(q, k, tables):
        found, its_lse = _dense(q[rows_q][None], k[rows_k][None], v[rows_k][None], *masks)
        out[rows_q] = found[0]
        lse[_lse_rows(rows_q)] = its_lse[0]
    return out, lse


def _work(q) -> torch.dtype:
    return torch.float64 if q.dtype == torch.float64 else torch.float32


def _lse_rows(rows):
    """Of [batch, heads, seqlen] or [heads, total], what belongs to rows of [batch, seqlen] or [total]."""
    return (rows[0], slice(None), rows[1]) if isinstance(rows, tuple) else (slice(None), rows)


def _sequences(q, k, tables):
    """(index of its rows in q, that in k) of each sequence."""
    cu_q, cu_k, used_q, used_k, padded_q, padded_k = tables
    return zip(_rows(q, cu_q, used_q, padded_q), _rows(k, cu_k, used_k, padded_k), strict=True)


def _rows(tensor, cu_seqlens, seqused, padded) -> list:
    if cu_seqlens is None:
        lengths = [tensor.shape[1]] * tensor.shape[0] if seqused is None else seqused.tolist()
        return [(i, slice(0, length)) for i, length in enumerate(lengths)]
    starts = (cu_seqlens if padded is None else padded).tolist()
    lengths = (cu_seqlens.diff() if seqused is None else seqused).tolist()
    return [slice(start, start + length) for start, length in zip(starts, lengths, strict=False)]


def _dense(q, k, v, softmax_scale, causal, *window):
    scale = q.shape[-1] ** -0.5 if softmax_scale is None else softmax_scale
    group = q.shape[2] // k.shape[2]
    qh = q.transpose(1, 2).to(_work(q))
    kh = k.transpose(1, 2).to(_work(q)).repeat_interleave(group, 1)
    vh = v.transpose(1, 2).to(_work(q)).repeat_interleave(group, 1)
    s = qh @ kh.transpose(-1, -2) * scale  # [B, H, M, N]
    keep = visible(q.shape[1], k.shape[1], causal, *window, device=q.device)
    seen = keep.any(-1)
    # A row of -inf has no softmax: give it zeros instead, and take the row out of the result.
    s = s.masked_fill(~keep, float("-inf")).masked_fill(~seen[:, None], 0.0)
    p = torch.softmax(s, -1).masked_fill(~keep, 0.0)
    lse = torch.logsumexp(s, -1).masked_fill(~seen, float("-inf"))
    return (p @ vh).transpose(1, 2).to(q.dtype).contiguous(), lse


@_in_own_precision
def attention_backward(
    dout, q, k, v, out, lse, dlse=None, softmax_scale: float | None = None, causal: bool = False,
    window_left: int = -1, window_right: int = -1, top_left: bool = False, *tables,
):  # fmt: skip
    """Gradients dq, dk, dv of `attention`, from what it returned, by the formula and without autograd."""
    masks = (softmax_scale, causal, window_left, window_right, top_left)
    if not any(table is not None for table in tables):
        return _dense_backward(dout, q, k, v, out, lse, dlse, *masks)
    dq, dk, dv = (torch.zeros_like(x, memory_format=torch.contiguous_format) for x in (q, k, v))
    for rows_q, rows_k in _sequences(q, k, tables):
        at = _lse_rows(rows_q)
        its_dlse = None if dlse is None else dlse[at][None]
        dq[rows_q], dk[rows_k], dv[rows_k] = _dense_backward(
            *(x[rows][None] for x, rows in ((dout, rows_q), (q, rows_q), (k, rows_k), (v, rows_k), (out, rows_q))),
            lse[at][None], its_dlse, *masks,
        )  # fmt: skip
    return dq, dk, dv


def _dense_backward(dout, q, k, v, out, lse, dlse, softmax_scale, causal, *window):
    scale = q.shape[-1] ** -0.5 if softmax_scale is None else softmax_scale
    work = lse.dtype
    batch, seqlen_k, heads_k, _ = k.shape
    group = q.shape[2] // heads_k
    qh, doh, oh = (x.transpose(1, 2).to(work) for x in (q, dout, out))
    kh, vh = (x.transpose(1, 2).to(work).repeat_interleave(group, 1) for x in (k, v))
    keep = visible(q.shape[1], seqlen_k, causal, *window, device=q.device)
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
