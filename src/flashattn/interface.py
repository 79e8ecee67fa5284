"""flash_attn_func and its packed forms: FlashAttention-2's names, argument order and defaults."""

from __future__ import annotations

import operator

import torch
from torch.autograd import forward_ad

from . import checks, ops


def _open(window_size) -> bool:
    """Whether a window is no window. Raises ValueError for negative bounds other than -1."""
    try:
        left, right = window_size
        bounds = [-1 if bound is None else operator.index(bound) for bound in (left, right)]
    except (TypeError, ValueError):
        bounds = [-2]
    if min(bounds) < -1:
        raise ValueError(
            f"flash_attn_func: window_size is {window_size!r}, expected (left, right), each -1, None or at least 0"
        )
    return max(bounds) == -1


def flash_attn_func(
    q,
    k,
    v,
    dropout_p=0.0,
    softmax_scale=None,
    causal=False,
    window_size=(-1, -1),
    softcap=0.0,
    alibi_slopes=None,
    deterministic=False,
    return_attn_probs=False,
    *,
    return_lse=False,
    bias=None,
    sink=None,
    causal_alignment="bottom_right",
    seqused_q=None,
    seqused_k=None,
    out=None,
):
    """softmax(softmax_scale * q k^T) v, exact, differentiable in q, k and v.

    q [batch, seqlen_q, heads_q, head_dim], k [batch, seqlen_k, heads_k, head_dim], v [batch, seqlen_k, heads_k,
    head_dim_v]; one of float16, bfloat16, float32 (float64 too on the CPU); head dims 1 to 256; heads_q a multiple of
    heads_k. Any strides; a tensor whose last dimension is not contiguous is copied once.
    softmax_scale: a number, default head_dim ** -0.5; may be zero or negative.
    causal: query i sees key j where j <= i + seqlen_k - seqlen_q (aligned bottom-right).
    deterministic: accepted; gradients are the same bits on every run anyway.
    return_lse: also return the natural log-sum-exp [batch, heads_q, seqlen_q], float32, which carries gradient.
    return_attn_probs: return (out, lse, None), as FlashAttention-2 without dropout.

    Returns out [batch, seqlen_q, heads_q, head_dim_v], contiguous. A row that sees no key gives out 0, lse -inf and
    zero gradients. Raises ValueError or TypeError for a wrong argument, NotImplementedError for a feature that is not
    built, before anything is launched. Method: FlashAttention-2 (Dao, 2023).
    """
    if (
        dropout_p != 0.0
        or softcap != 0.0
        or (window_size != (-1, -1) and not _open(window_size))
        or causal_alignment != "bottom_right"
        or not (alibi_slopes is bias is sink is seqused_q is seqused_k is out is None)
    ):
        _refuse(
            dropout_p, window_size, softcap, alibi_slopes, bias, sink, causal_alignment, seqused_q, seqused_k, out
        )  # fmt: skip
    if type(causal) is not bool or type(softmax_scale) not in (float, type(None)):
        causal, softmax_scale = checks.scalars(causal, softmax_scale)
    if not torch.compiler.is_compiling() and (
        forward_ad._current_level >= 0 or torch._C._functorch.peek_interpreter_stack() is not None
    ):
        checks.refuse_transforms()
    if torch.is_grad_enabled() and (q.requires_grad or k.requires_grad or v.requires_grad):
        result, lse = ops.differentiable(q, k, v, softmax_scale, causal)
    elif return_lse or return_attn_probs:
        result, lse = ops.attn_fwd(q, k, v, softmax_scale, causal)
    else:
        return ops.inference(q, k, v, softmax_scale, causal)
    if return_attn_probs:
        return result, lse, None
    return (result, lse) if return_lse else result


def _refuse(dropout_p, window_size, softcap, alibi_slopes, bias, sink, causal_alignment, seqused_q, seqused_k, out):
    """Raise for the first of these that asks for something."""
    checks.not_built(
        "flash_attn_func",
        dropout_p=(dropout_p, dropout_p == 0.0),
        window_size=(window_size, _open(window_size)),
        softcap=(softcap, softcap == 0.0),
        alibi_slopes=(alibi_slopes, alibi_slopes is None),
        bias=(bias, bias is None),
        sink=(sink, sink is None),
        causal_alignment=(causal_alignment, causal_alignment == "bottom_right"),
        seqused_q=(seqused_q, seqused_q is None),
        seqused_k=(seqused_k, seqused_k is None),
        out=(out, out is None),
    )


def flash_attn_kvpacked_func(
    q,
    kv,
    dropout_p=0.0,
    softmax_scale=None,
    causal=False,
    window_size=(-1, -1),
    softcap=0.0,
    alibi_slopes=None,
    deterministic=False,
    return_attn_probs=False,
    **options,
):
    """`flash_attn_func` with k and v in one tensor kv [batch, seqlen_k, 2, heads_k, head_dim]; they are not copied."""
    k, v = checks.packed("flash_attn_kvpacked_func", "kv", kv, 2)
    return flash_attn_func(
        q, k, v, dropout_p, softmax_scale, causal, window_size, softcap, alibi_slopes, deterministic,
        return_attn_probs, **options,
    )  # fmt: skip


def flash_attn_qkvpacked_func(
    qkv,
    dropout_p=0.0,
    softmax_scale=None,
    causal=False,
    window_size=(-1, -1),
    softcap=0.0,
    alibi_slopes=None,
    deterministic=False,
    return_attn_probs=False,
    **options,
):
    """`flash_attn_func` with q, k and v in one tensor qkv [batch, seqlen, 3, heads, head_dim]; they are not copied."""
    q, k, v = checks.packed("flash_attn_qkvpacked_func", "qkv", qkv, 3)
    return flash_attn_func(
        q, k, v, dropout_p, softmax_scale, causal, window_size, softcap, alibi_slopes, deterministic,
        return_attn_probs, **options,
    )  # fmt: skip


def supported_features() -> dict[str, bool]:
    """What a call may ask for, and whether it is built."""
    built = ("causal", "gqa", "softmax_scale", "head_dim_v", "return_lse", "lse_gradient", "deterministic")
    missing = ("varlen", "window", "softcap", "alibi", "bias", "sink", "dropout", "kv_cache", "paged_kv", "fp8")
    return {**dict.fromkeys(built, True), **dict.fromkeys(missing, False)}
