"""Attention forward: O = softmax(scale * Q K^T) V, LSE = log sum exp(scale * Q K^T).

One program owns BLOCK_M queries of one head of one sequence and walks over the keys they see, BLOCK_N at a time.
"""

import triton
import triton.language as tl

from .flash_common import (
    LN_2,
    LOG2_E,
    NEG_INF,
    keys_of,
    load_rows,
    online_softmax,
    row_base,
    rows_of,
    store_rows,
    tile_of,
    visible,
    window,
)


@triton.jit
def attend(
    acc, l, m, q, k_base, v_base, k_stride, v_stride, offs_m, begin, whole, end, stop, seqlen_k, left, right,
    scale_log2, HEAD_DIM: tl.constexpr, HEAD_DIM_V: tl.constexpr, MASK: tl.constexpr, ALLOW_TF32: tl.constexpr,
    BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_DV: tl.constexpr,
):  # fmt: skip
    """Fold keys begin..stop into acc, l, m. The queries see all keys whole..end, and those exist."""
    offs_d = tl.arange(0, BLOCK_D)
    offs_dv = tl.arange(0, BLOCK_DV)
    # Only the scalar bases move: a tile of pointers that lives across the loops costs registers in two layouts.
    rows = tl.arange(0, BLOCK_N).to(tl.int64)[:, None]
    k_offs = rows * k_stride + offs_d[None, :]
    v_offs = rows * v_stride + offs_dv[None, :]
    k_base += begin * k_stride
    v_base += begin * v_stride
    for start_n in tl.range(begin, stop, BLOCK_N):
        offs_n = start_n + tl.arange(0, BLOCK_N)
        k = load_rows(k_base + k_offs, offs_n, seqlen_k, offs_d, HEAD_DIM, BLOCK_D)  # [N, D]
        s = tl.dot(q, tl.trans(k), allow_tf32=ALLOW_TF32) * scale_log2  # [M, N]
        if (start_n < whole) | (start_n >= end):
            s = tl.where(visible(offs_m[:, None], offs_n[None, :], seqlen_k, left, right, MASK), s, NEG_INF)
        p, alpha, m, l = online_softmax(s, m, l)
        v = load_rows(v_base + v_offs, offs_n, seqlen_k, offs_dv, HEAD_DIM_V, BLOCK_DV)  # [N, DV]
        acc = tl.dot(p.to(v.dtype), v, acc * alpha[:, None], allow_tf32=ALLOW_TF32)  # [M, DV]
        k_base += k_stride * BLOCK_N
        v_base += v_stride * BLOCK_N
    return acc, l, m


@triton.jit
def attn_fwd(
    # pointers; lse is null unless write_lse, the tables where a kind does not need them
    q_ptr, k_ptr, v_ptr, out_ptr, lse_ptr, starts_q_ptr, lengths_q_ptr, starts_k_ptr, lengths_k_ptr,
    # strides (batch, seqlen, head) in elements
    q_strides, k_strides, v_strides, out_strides,
    # sizes and scalars
    batch, heads_q, heads_k, seqlen_q, seqlen_k, kind_q, kind_k, softmax_scale, window_left, window_right, top_left,
    write_lse,
    # variant
    HEAD_DIM: tl.constexpr, HEAD_DIM_V: tl.constexpr, MASK: tl.constexpr, ALLOW_TF32: tl.constexpr,
    # tiles
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_DV: tl.constexpr,
):  # fmt: skip
    seq, off_h, tile = tile_of(tl.program_id(0), heads_q, batch, seqlen_q, kind_q, starts_q_ptr, BLOCK_M)
    off_hk = off_h // (heads_q // heads_k)
    off_bq, start_q, rows_q, used_q = rows_of(seq, batch, seqlen_q, kind_q, starts_q_ptr, lengths_q_ptr)
    off_bk, start_k, _, used_k = rows_of(seq, batch, seqlen_k, kind_k, starts_k_ptr, lengths_k_ptr)
    # The last queries see the most keys, so they start first; a tile more than rows stays behind them.
    tiles = tl.cdiv(rows_q, BLOCK_M)
    start_m = tl.where(tile < tiles, tiles - 1 - tile, tiles) * BLOCK_M
    used_k = tl.where(start_m < used_q, used_k, 0)
    left, right = window(used_q, used_k, window_left, window_right, top_left)

    offs_m = start_m + tl.arange(0, BLOCK_M)
    offs_d = tl.arange(0, BLOCK_D)
    offs_dv = tl.arange(0, BLOCK_DV)
    q_base = row_base(q_ptr, q_strides, off_bq, start_q, off_h)
    k_base = row_base(k_ptr, k_strides, off_bk, start_k, off_hk)
    v_base = row_base(v_ptr, v_strides, off_bk, start_k, off_hk)
    q_ptrs = q_base + offs_m.to(tl.int64)[:, None] * q_strides[1] + offs_d[None, :]
    q = load_rows(q_ptrs, offs_m, used_q, offs_d, HEAD_DIM, BLOCK_D)  # [M, D]

    m = tl.full([BLOCK_M], NEG_INF, tl.float32)
    l = tl.zeros([BLOCK_M], tl.float32)
    acc = tl.zeros([BLOCK_M, BLOCK_DV], tl.float32)
    scale_log2 = softmax_scale * LOG2_E
    begin, whole, end, stop = keys_of(start_m, used_k, left, right, MASK, BLOCK_M, BLOCK_N)
    acc, l, m = attend(
        acc, l, m, q, k_base, v_base, k_strides[1], v_strides[1], offs_m, begin, whole, end, stop, used_k, left, right,
        scale_log2, HEAD_DIM, HEAD_DIM_V, MASK, ALLOW_TF32, BLOCK_N, BLOCK_D, BLOCK_DV,
    )  # fmt: skip

    # A row without a key has l = 0 and acc = 0: its output is 0 and its LSE -inf. A row that is not used looks alike.
    l = tl.where(offs_m < used_q, l, 0.0)
    out = tl.where((l == 0.0)[:, None], 0.0, acc * (1.0 / tl.where(l == 0.0, 1.0, l))[:, None])
    out_base = row_base(out_ptr, out_strides, off_bq, start_q, off_h)
    out_ptrs = out_base + offs_m.to(tl.int64)[:, None] * out_strides[1] + offs_dv[None, :]
    store_rows(out_ptrs, out.to(out_ptr.dtype.element_ty), offs_m, rows_q, offs_dv, HEAD_DIM_V, BLOCK_DV)
    if write_lse != 0:
        lse = tl.where(l == 0.0, NEG_INF, m + tl.log2(tl.where(l == 0.0, 1.0, l))) * LN_2
        row = (off_bq * heads_q + off_h).to(tl.int64) * seqlen_q + start_q + offs_m
        tl.store(lse_ptr + row, lse, mask=offs_m < rows_q)
