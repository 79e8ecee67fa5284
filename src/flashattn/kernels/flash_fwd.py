"""Attention forward: O = softmax(scale * Q K^T) V, LSE = log sum exp(scale * Q K^T).

One program owns BLOCK_M queries of one head and walks over the keys they see, BLOCK_N at a time.
"""

import triton
import triton.language as tl

from .flash_common import LN_2, LOG2_E, NEG_INF, load_rows, online_softmax, store_rows, visible


@triton.jit
def attend(
    acc, l, m, q, k_base, v_base, k_stride, v_stride, offs_m, start, stop, seqlen_q, seqlen_k, scale_log2,
    HEAD_DIM: tl.constexpr, HEAD_DIM_V: tl.constexpr, IS_CAUSAL: tl.constexpr, ALLOW_TF32: tl.constexpr,
    CHECK: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_DV: tl.constexpr,
):  # fmt: skip
    """Fold keys start..stop into acc, l, m. Without CHECK every query sees all of these keys, and they all exist."""
    offs_d = tl.arange(0, BLOCK_D)
    offs_dv = tl.arange(0, BLOCK_DV)
    # Only the scalar bases move: a tile of pointers that lives across the loops costs registers in two layouts.
    rows = tl.arange(0, BLOCK_N).to(tl.int64)[:, None]
    k_offs = rows * k_stride + offs_d[None, :]
    v_offs = rows * v_stride + offs_dv[None, :]
    k_base += start * k_stride
    v_base += start * v_stride
    for start_n in tl.range(start, stop, BLOCK_N):
        offs_n = start_n + tl.arange(0, BLOCK_N)
        k = load_rows(k_base + k_offs, offs_n, seqlen_k, offs_d, HEAD_DIM, BLOCK_D, CHECK)  # [N, D]
        s = tl.dot(q, tl.trans(k), allow_tf32=ALLOW_TF32) * scale_log2  # [M, N]
        if CHECK:
            s = tl.where(visible(offs_m, offs_n, seqlen_q, seqlen_k, IS_CAUSAL), s, NEG_INF)
        p, alpha, m, l = online_softmax(s, m, l)
        v = load_rows(v_base + v_offs, offs_n, seqlen_k, offs_dv, HEAD_DIM_V, BLOCK_DV, CHECK)  # [N, DV]
        acc = tl.dot(p.to(v.dtype), v, acc * alpha[:, None], allow_tf32=ALLOW_TF32)  # [M, DV]
        k_base += k_stride * BLOCK_N
        v_base += v_stride * BLOCK_N
    return acc, l, m


@triton.jit
def attn_fwd(
    # pointers; lse is null unless write_lse
    q_ptr, k_ptr, v_ptr, out_ptr, lse_ptr,
    # strides (batch, seqlen, head) in elements
    q_strides, k_strides, v_strides, out_strides,
    # sizes and scalars
    heads_q, heads_k, seqlen_q, seqlen_k, softmax_scale, write_lse,
    # variant
    HEAD_DIM: tl.constexpr, HEAD_DIM_V: tl.constexpr, IS_CAUSAL: tl.constexpr, ALLOW_TF32: tl.constexpr,
    # tiles
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_DV: tl.constexpr,
):  # fmt: skip
    tiles = tl.cdiv(seqlen_q, BLOCK_M)
    pid = tl.program_id(0)
    # The last queries see the most keys, so they start first.
    start_m = (tiles - 1 - pid % tiles) * BLOCK_M
    off_h = (pid // tiles) % heads_q
    off_b = (pid // tiles) // heads_q
    off_hk = off_h // (heads_q // heads_k)

    offs_m = start_m + tl.arange(0, BLOCK_M)
    offs_d = tl.arange(0, BLOCK_D)
    offs_dv = tl.arange(0, BLOCK_DV)
    q_base = q_ptr + off_b.to(tl.int64) * q_strides[0] + off_h.to(tl.int64) * q_strides[2]
    k_base = k_ptr + off_b.to(tl.int64) * k_strides[0] + off_hk.to(tl.int64) * k_strides[2]
    v_base = v_ptr + off_b.to(tl.int64) * v_strides[0] + off_hk.to(tl.int64) * v_strides[2]
    q_ptrs = q_base + offs_m.to(tl.int64)[:, None] * q_strides[1] + offs_d[None, :]
    q = load_rows(q_ptrs, offs_m, seqlen_q, offs_d, HEAD_DIM, BLOCK_D, True)  # [M, D]

    # Keys up to `full` are seen by every query of the tile; those up to `stop` by some.
    stop = seqlen_k
    full = seqlen_k
    if IS_CAUSAL:
        shift = seqlen_k - seqlen_q
        stop = tl.minimum(seqlen_k, start_m + BLOCK_M + shift)
        full = tl.minimum(seqlen_k, tl.maximum(start_m + 1 + shift, 0))
    full = (full // BLOCK_N) * BLOCK_N

    m = tl.full([BLOCK_M], NEG_INF, tl.float32)
    l = tl.zeros([BLOCK_M], tl.float32)
    acc = tl.zeros([BLOCK_M, BLOCK_DV], tl.float32)
    scale_log2 = softmax_scale * LOG2_E
    acc, l, m = attend(
        acc, l, m, q, k_base, v_base, k_strides[1], v_strides[1], offs_m, 0, full, seqlen_q, seqlen_k, scale_log2,
        HEAD_DIM, HEAD_DIM_V, IS_CAUSAL, ALLOW_TF32, False, BLOCK_N, BLOCK_D, BLOCK_DV,
    )  # fmt: skip
    acc, l, m = attend(
        acc, l, m, q, k_base, v_base, k_strides[1], v_strides[1], offs_m, full, stop, seqlen_q, seqlen_k, scale_log2,
        HEAD_DIM, HEAD_DIM_V, IS_CAUSAL, ALLOW_TF32, True, BLOCK_N, BLOCK_D, BLOCK_DV,
    )  # fmt: skip

    # A row without a key has l = 0 and acc = 0: its output is 0 and its LSE -inf.
    out = acc / tl.where(l == 0.0, 1.0, l)[:, None]
    out_base = out_ptr + off_b.to(tl.int64) * out_strides[0] + off_h.to(tl.int64) * out_strides[2]
    out_ptrs = out_base + offs_m.to(tl.int64)[:, None] * out_strides[1] + offs_dv[None, :]
    store_rows(out_ptrs, out.to(out_ptr.dtype.element_ty), offs_m, seqlen_q, offs_dv, HEAD_DIM_V, BLOCK_DV)
    if write_lse != 0:
        lse = tl.where(l == 0.0, NEG_INF, m + tl.log2(tl.where(l == 0.0, 1.0, l))) * LN_2
        row = (off_b * heads_q + off_h).to(tl.int64) * seqlen_q + offs_m
        tl.store(lse_ptr + row, lse, mask=offs_m < seqlen_q)
