"""Arguments -> facts, or one clear error; the only place that raises for users' mistakes."""

from __future__ import annotations

import torch

from .variants import MAX_HEAD_DIM

DTYPE_NAMES = {torch.float16: "fp16", torch.bfloat16: "bf16", torch.float32: "fp32"}
_ACCEPTED = "float16, bfloat16 or float32 (float64 on the CPU)"
# What is multiplied by log2(e) in float32.
MAX_SCALE = 2.0**127
_LAYOUT = "(batch, seqlen, heads, head_dim)"


def dense(q, k, v, softmax_scale=None) -> None:
    """Raise unless q, k, v are what dense attention takes; reads no data, so traced tensors may be given."""
    dtype, device = q.dtype, q.device
    if q.dim() == k.dim() == v.dim() == 4 and dtype in DTYPE_NAMES and dtype == k.dtype == v.dtype:
        batch, _, heads_q, head_dim = q.shape
        batch_k, seqlen_k, heads_k, head_dim_k = k.shape
        batch_v, seqlen_v, heads_v, head_dim_v = v.shape
        if (
            batch == batch_k == batch_v
            and seqlen_k == seqlen_v
            and 0 < heads_k == heads_v
            and heads_q > 0 == heads_q % heads_k
            and 0 < head_dim == head_dim_k <= MAX_HEAD_DIM
            and 0 < head_dim_v <= MAX_HEAD_DIM
            and device == k.device == v.device
            and (softmax_scale is None or -MAX_SCALE < softmax_scale < MAX_SCALE)
        ):
            return
    _explain(q, k, v, softmax_scale)


def _explain(q, k, v, softmax_scale) -> None:
    """Raise for the first thing that is wrong; float64 on the CPU is right."""
    for name, tensor in (("q", q), ("k", k), ("v", v)):
        if tensor.dim() != 4:
            raise ValueError(f"attention: {name} has {tensor.dim()} dimensions, expected 4, {_LAYOUT}")
        if tensor.dtype != q.dtype:
            raise TypeError(f"attention: {name} is {tensor.dtype} but q is {q.dtype}; all three must have one dtype")
        if tensor.device != q.device:
            raise ValueError(
                f"attention: {name} is on {tensor.device} but q is on {q.device}; all must be on one device"
            )
    if q.dtype not in DTYPE_NAMES and not (q.dtype == torch.float64 and q.device.type in ("cpu", "meta")):
        raise TypeError(f"attention: q is {q.dtype}, expected {_ACCEPTED}")
    batch, _, heads_q, head_dim = q.shape
    if k.shape[0] != batch or v.shape[0] != batch:
        raise ValueError(f"attention: batch is {batch} in q, {k.shape[0]} in k and {v.shape[0]} in v; it must be one")
    if k.shape[1] != v.shape[1]:
        raise ValueError(f"attention: k has seqlen {k.shape[1]} but v has {v.shape[1]}; they must be equal")
    if k.shape[2] != v.shape[2]:
        raise ValueError(f"attention: k has {k.shape[2]} heads but v has {v.shape[2]}; they must be equal")
    if k.shape[2] == 0 or heads_q == 0 or heads_q % k.shape[2] != 0:
        raise ValueError(f"attention: q has {heads_q} heads and k has {k.shape[2]}; q's must be a multiple of k's")
    if k.shape[3] != head_dim:
        raise ValueError(f"attention: head_dim is {head_dim} in q but {k.shape[3]} in k; they must be equal")
    for name, size in (("q", head_dim), ("v", v.shape[3])):
        if not 1 <= size <= MAX_HEAD_DIM:
            raise ValueError(f"attention: head_dim of {name} is {size}, expected 1 to {MAX_HEAD_DIM}")
    if softmax_scale is not None and not -MAX_SCALE < softmax_scale < MAX_SCALE:
        raise ValueError(f"attention: softmax_scale is {softmax_scale}, expected None or a number within {MAX_SCALE:g}")


def scalars(causal, softmax_scale) -> tuple:
    """(causal, softmax_scale) as a bool and a float or None. Raises TypeError for what is neither."""
    if type(causal) is not bool and causal not in (0, 1):
        raise TypeError(f"flash_attn_func: causal is {causal!r}, expected True or False")
    if isinstance(softmax_scale, torch.Tensor):
        raise TypeError(
            "flash_attn_func: softmax_scale is a tensor, expected a number or None; a scale that needs a gradient, "
            "or that only the GPU knows, is multiplied into q"
        )
    if softmax_scale is not None and not isinstance(softmax_scale, (int, float, torch.SymFloat, torch.SymInt)):
        raise TypeError(f"flash_attn_func: softmax_scale is {softmax_scale!r}, expected a number or None")
    return bool(causal), softmax_scale if softmax_scale is None else float(softmax_scale)


def refuse_transforms() -> None:
    raise NotImplementedError(
        "flash_attn_func: torch.func transforms (grad, vmap, jvp) and forward-mode derivatives are not supported; "
        "call it outside of them, with the batch in dimension 0, and use torch.autograd for gradients"
    )


def lse_dtype(q) -> torch.dtype:
    """That of the log-sum-exp of scores of q."""
    return torch.float64 if q.dtype == torch.float64 else torch.float32


def gradient_inputs(dout, q, v, out, lse, dlse=None) -> None:
    """Raise unless the tensors that a forward handed to its backward have the shapes it made them with."""
    expected = (*q.shape[:3], v.shape[3])
    for name, tensor in (("dout", dout), ("out", out)):
        if tuple(tensor.shape) != tuple(expected):
            raise ValueError(f"attn_bwd: {name} has shape {tuple(tensor.shape)}, expected {tuple(expected)}")
        if tensor.device != q.device:
            raise ValueError(f"attn_bwd: {name} is on {tensor.device} but q is on {q.device}")
        if tensor.dtype != q.dtype:
            raise TypeError(f"attn_bwd: {name} is {tensor.dtype} but q is {q.dtype}")
    rows = (q.shape[0], q.shape[2], q.shape[1])
    wanted = lse_dtype(q)
    for name, tensor in (("lse", lse), ("dlse", dlse)):
        if tensor is None:
            continue
        if tuple(tensor.shape) != rows or tensor.device != q.device:
            found = f"{name} has shape {tuple(tensor.shape)} on {tensor.device}"
            raise ValueError(f"attn_bwd: {found}, expected {rows} on {q.device}")
        if tensor.dtype != wanted:
            raise TypeError(f"attn_bwd: {name} is {tensor.dtype}, expected {wanted}")


def not_built(function: str, **features) -> None:
    """Raise for the first feature that was asked for and does not exist yet. Each is (given, is it off)."""
    for name, (value, off) in features.items():
        if not off:
            raise NotImplementedError(
                f"{function}: {name}={_shown(value)} asks for a feature that is not built yet; supported are "
                "softmax_scale, causal, return_lse and return_attn_probs, for dense q, k, v"
            )


def _shown(value) -> str:
    return f"<tensor of shape {tuple(value.shape)}>" if isinstance(value, torch.Tensor) else repr(value)


def packed(function: str, name: str, tensor, parts: int):
    """The `parts` tensors of a packed one (batch, seqlen, parts, heads, head_dim), as views."""
    if tensor.dim() != 5 or tensor.shape[2] != parts:
        raise ValueError(
            f"{function}: {name} has shape {tuple(tensor.shape)}, expected (batch, seqlen, {parts}, heads, head_dim)"
        )
    return tensor.unbind(2)
