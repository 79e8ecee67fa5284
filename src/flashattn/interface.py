"""flash_attn_func and its packed forms: FlashAttention-2's names, argument order and defaults."""

from __future__ import annotations

import torch
from torch.autograd import forward_ad

from . import checks, ops

_NO_WINDOW = (-1, -1)


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
    window_size: (left, right), inclusive: query i also sees no key before i + seqlen_k - seqlen_q - left and none
    behind i + seqlen_k - seqlen_q + right; -1 or None is no bound; with causal, right is 0.
    causal_alignment: "top_left" counts both masks from the first query and key instead: without seqlen_k - seqlen_q.
    seqused_q, seqused_k: int32 [batch], how many rows of each batch element are used, on q's device. The others are not
    read; their out is 0, their lse -inf, their gradients 0. Masks count from the last used rows.
    deterministic: accepted; gradients are the same bits on every run anyway, alone or in a batch.
    return_lse: also return the natural log-sum-exp [batch, heads_q, seqlen_q], float32, which carries gradient.
    return_attn_probs: return (out, lse, None), as FlashAttention-2 without dropout.

    Returns out [batch, seqlen_q, heads_q, head_dim_v], contiguous. A row that sees no key gives out 0, lse -inf and
    zero gradients. Raises ValueError or TypeError for a wrong argument, NotImplementedError for a feature that is not
    built, before anything is launched. Method: FlashAttention-2 (Dao, 2023).
    """
    if dropout_p != 0.0 or softcap != 0.0 or not (alibi_slopes is bias is sink is out is None):
        _refuse("flash_attn_func", dropout_p, softcap, alibi_slopes, bias, sink, out)
    call = (softmax_scale, causal)
    if not (seqused_q is seqused_k is None):
        checks.tables("flash_attn_func", (None, None, seqused_q, seqused_k))
        tables = (None, None, seqused_q, seqused_k)
        call = (*call, *checks.window(window_size), checks.is_top_left(causal_alignment), *tables)
    elif window_size != _NO_WINDOW or causal_alignment != "bottom_right":
        call = (*call, *checks.window(window_size), checks.is_top_left(causal_alignment))
    return _attend(q, k, v, call, return_lse, return_attn_probs)


def _attend(q, k, v, call: tuple, return_lse, return_attn_probs):
    """What the public functions return. `call` is what `checks.inputs` takes behind the tensors."""
    softmax_scale, causal = call[:2]
    if type(causal) is not bool or type(softmax_scale) not in (float, type(None)):
        call = (*checks.scalars(causal, softmax_scale), *call[2:])
    if not torch.compiler.is_compiling() and (
        forward_ad._current_level >= 0 or torch._C._functorch.peek_interpreter_stack() is not None
    ):
        checks.refuse_transforms()
    if torch.is_grad_enabled() and (q.requires_grad or k.requires_grad or v.requires_grad):
        result, lse = ops.differentiable(q, k, v, *call)
    elif return_lse or return_attn_probs:
        result, lse = ops.attn_fwd(q, k, v, *call)
    else:
        return ops.inference(q, k, v, *call)
    if return_attn_probs:
        return result, lse, None
    return (result, lse) if return_lse else result


def _refuse(function, dropout_p, softcap, alibi_slopes, bias, sink, out, block_table=None):
    """Raise for the first of these that asks for something."""
    checks.not_built(
        function,
        dropout_p=(dropout_p, dropout_p == 0.0),
        softcap=(softcap, softcap == 0.0),
        alibi_slopes=(alibi_slopes, alibi_slopes is None),
        bias=(bias, bias is None),
        sink=(sink, sink is None),
        out=(out, out is None),
        block_table=(block_table, block_table is None),
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


def flash_attn_varlen_func(
    q,
    k,
    v,
    cu_seqlens_q,
    cu_seqlens_k,
    max_seqlen_q=None,
    max_seqlen_k=None,
    dropout_p=0.0,
    softmax_scale=None,
    causal=False,
    window_size=(-1, -1),
    softcap=0.0,
    alibi_slopes=None,
    deterministic=False,
    return_attn_probs=False,
    block_table=None,
    *,
    return_lse=False,
    bias=None,
    sink=None,
    causal_alignment="bottom_right",
    seqused_q=None,
    seqused_k=None,
    cu_seqlens_q_padded=None,
    cu_seqlens_k_padded=None,
    out=None,
):
    """`flash_attn_func` for sequences of different lengths, packed behind each other.

    q [total_q, heads_q, head_dim], k [total_k, heads_k, head_dim], v [total_k, heads_k, head_dim_v].
    cu_seqlens_q, cu_seqlens_k: int32 [batch + 1] on q's device, ascending from 0: sequence i has the rows
    cu_seqlens[i] up to cu_seqlens[i + 1]. int64 is converted.
    cu_seqlens_q_padded, cu_seqlens_k_padded: int32 [batch + 1], where sequence i starts if there are gaps between
    sequences; cu_seqlens then gives the lengths alone.
    seqused_q, seqused_k: int32 [batch], how many rows of each sequence are used, instead of all.
    Either side may be padded instead of packed: q, or k and v, of four dimensions [batch, seqlen, heads, head_dim] with
    None for its cu_seqlens, and lengths in seqused.
    max_seqlen_q, max_seqlen_k: accepted; they are not needed, and nothing waits for the GPU to find them. With
    FLASHATTN_DEBUG=1 one that is too small raises ValueError.

    Masks count from each sequence's own rows. Rows that no sequence uses are never read; their out is 0, their lse
    -inf, their gradients 0. A sequence has the same bits whatever it is batched with. Returns out like q, with
    head_dim_v; lse is [heads_q, total_q], or [batch, heads_q, seqlen_q] for a padded q. Everything else is as in
    `flash_attn_func`.
    """
    if dropout_p != 0.0 or softcap != 0.0 or not (alibi_slopes is bias is sink is out is block_table is None):
        _refuse("flash_attn_varlen_func", dropout_p, softcap, alibi_slopes, bias, sink, out, block_table)
    left, right = checks.window(window_size, "flash_attn_varlen_func")
    top_left = checks.is_top_left(causal_alignment, "flash_attn_varlen_func")
    tables = (cu_seqlens_q, cu_seqlens_k, seqused_q, seqused_k, cu_seqlens_q_padded, cu_seqlens_k_padded)
    checks.tables("flash_attn_varlen_func", tables)
    if not torch.compiler.is_compiling():
        ops.check_max_seqlens(q, k, tables, max_seqlen_q, max_seqlen_k)
    call = (softmax_scale, causal, left, right, top_left, *tables)
    return _attend(q, k, v, call, return_lse, return_attn_probs)


def flash_attn_varlen_kvpacked_func(
    q,
    kv,
    cu_seqlens_q,
    cu_seqlens_k,
    max_seqlen_q=None,
    max_seqlen_k=None,
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
    """`flash_attn_varlen_func` with k and v in one tensor kv [total_k, 2, heads_k, head_dim]; they are not copied."""
    k, v = checks.packed("flash_attn_varlen_kvpacked_func", "kv", kv, 2, varlen=True)
    return flash_attn_varlen_func(
        q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, dropout_p, softmax_scale, causal, window_size,
        softcap, alibi_slopes, deterministic, return_attn_probs, **options,
    )  # fmt: skip


def flash_attn_varlen_qkvpacked_func(
    qkv,
    cu_seqlens,
    max_seqlen=None,
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
    """`flash_attn_varlen_func` with q, k and v in one tensor qkv [total, 3, heads, head_dim]; they are not copied."""
    q, k, v = checks.packed("flash_attn_varlen_qkvpacked_func", "qkv", qkv, 3, varlen=True)
    return flash_attn_varlen_func(
        q, k, v, cu_seqlens, cu_seqlens, max_seqlen, max_seqlen, dropout_p, softmax_scale, causal, window_size,
        softcap, alibi_slopes, deterministic, return_attn_probs, **options,
    )  # fmt: skip


def supported_features() -> dict[str, bool]:
    """What a call may ask for, and whether it is built."""
    built = (
        *("causal", "gqa", "softmax_scale", "head_dim_v", "return_lse", "lse_gradient", "deterministic"),
        *("varlen", "padded", "window", "top_left"),
    )
    missing = ("softcap", "alibi", "bias", "sink", "dropout", "kv_cache", "paged_kv", "fp8")
    return {**dict.fromkeys(built, True), **dict.fromkeys(missing, False)}
