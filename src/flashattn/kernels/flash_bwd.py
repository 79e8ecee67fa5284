"""Attention backward. With P = exp(S - LSE), S = scale * Q K^T and delta = rowsum(dO * O) - dLSE:

    dV = P^T dO,   dS = P * (dO V^T - delta),   dQ = scale * dS K,   dK = scale * dS^T Q.

`bwd_preprocess` computes delta of all rows that there are; one program of `bwd_dkdv` owns BLOCK_N keys of one key head
of one sequence and walks over the queries that see them, of every query head of its group; one program of `bwd_dq`
owns BLOCK_M queries. Nothing is added atomically, so the results do not depend on timing.
"""

import triton
import triton.language as tl

from .flash_common import (
    CAUSAL,
    LOG2_E,
    keys_of,
    load_rows,
    queries_of,
    row_base,
    rows_of,
    store_rows,
    tile_of,
    visible,
    window,
)


@triton.jit
def bwd_preprocess(
    # pointers; dlse is null unless add_dlse
    out_ptr, dout_ptr, dlse_ptr, delta_ptr,
    # strides (batch, seqlen, head) in elements
    out_strides, dout_strides,
    # sizes and scalars
    heads_q, seqlen_q, add_dlse,
    # variant
    HEAD_DIM_V: tl.constexpr,
    # tiles
    BLOCK_M: tl.constexpr, BLOCK_DV: tl.constexpr,
):  # fmt: skip
    """delta [batch, heads, seqlen_q] = sum over head_dim of dO * O, less the gradient of LSE."""
    tiles = tl.cdiv(seqlen_q, BLOCK_M)
    pid = tl.program_id(0)
    offs_m = (pid % tiles) * BLOCK_M + tl.arange(0, BLOCK_M)
    offs_d = tl.arange(0, BLOCK_DV)
    off_h = (pid // tiles) % heads_q
    off_b = (pid // tiles) // heads_q
    out_base = out_ptr + off_b.to(tl.int64) * out_strides[0] + off_h.to(tl.int64) * out_strides[2]
    dout_base = dout_ptr + off_b.to(tl.int64) * dout_strides[0] + off_h.to(tl.int64) * dout_strides[2]
    rows = offs_m.to(tl.int64)[:, None]
    out = load_rows(out_base + rows * out_strides[1] + offs_d[None, :], offs_m, seqlen_q, offs_d, HEAD_DIM_V, BLOCK_DV)
    dout = load_rows(
        dout_base + rows * dout_strides[1] + offs_d[None, :], offs_m, seqlen_q, offs_d, HEAD_DIM_V, BLOCK_DV
    )
    delta = tl.sum(out.to(tl.float32) * dout.to(tl.float32), 1)  # [M]
    row = (off_b * heads_q + off_h).to(tl.int64) * seqlen_q + offs_m
    if add_dlse != 0:
        delta -= tl.load(dlse_ptr + row, mask=offs_m < seqlen_q, other=0.0)
    tl.store(delta_ptr + row, delta, mask=offs_m < seqlen_q)


@triton.jit
def load_lse(lse_ptrs, offs_m, seqlen_q):
    """LSE in base 2; +inf for a row without a key, past the end too, so that its weights are 2^-inf = 0."""
    lse = tl.load(lse_ptrs, mask=offs_m < seqlen_q, other=float("inf"))
    return tl.where(lse == float("-inf"), float("inf"), lse * LOG2_E)


@triton.jit
def weights(s, lse):
    """P = 2^(s - lse), at most 1: at huge scores the rounding of lse alone would make it infinite."""
    return tl.exp2(tl.minimum(s - lse, 0.0))


@triton.jit
def add_dkdv(
    dk, dv, k, v, q_base, do_base, lse_base, delta_base, q_stride, do_stride, offs_n, begin, whole, end, stop,
    seqlen_q, seqlen_k, left, right, scale_log2,
    HEAD_DIM: tl.constexpr, HEAD_DIM_V: tl.constexpr, MASK: tl.constexpr, ALLOW_TF32: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_DV: tl.constexpr,
):  # fmt: skip
    """Add what queries begin..stop give to dk / scale and dv; those whole..end see all the keys."""
    offs_d = tl.arange(0, BLOCK_D)
    offs_dv = tl.arange(0, BLOCK_DV)
    # Only the scalar bases move: a tile of pointers that lives across the loops costs registers in two layouts.
    rows = tl.arange(0, BLOCK_M).to(tl.int64)[:, None]
    q_offs = rows * q_stride + offs_d[None, :]
    do_offs = rows * do_stride + offs_dv[None, :]
    q_base += begin * q_stride
    do_base += begin * do_stride
    for start_m in tl.range(begin, stop, BLOCK_M):
        offs_m = start_m + tl.arange(0, BLOCK_M)
        # A query past the end has q = do = 0 and lse = +inf: its weights are 0 without a mask.
        q = load_rows(q_base + q_offs, offs_m, seqlen_q, offs_d, HEAD_DIM, BLOCK_D)  # [M, D]
        lse = load_lse(lse_base + offs_m, offs_m, seqlen_q)
        s = tl.dot(k, tl.trans(q), allow_tf32=ALLOW_TF32) * scale_log2  # [N, M]
        p = weights(s, lse[None, :])
        if MASK >= CAUSAL:  # noqa: SIM102 (one is compiled away, the other is not)
            if (start_m < whole) | (start_m >= end):
                p = tl.where(visible(offs_m[None, :], offs_n[:, None], seqlen_k, left, right, MASK), p, 0.0)
        do = load_rows(do_base + do_offs, offs_m, seqlen_q, offs_dv, HEAD_DIM_V, BLOCK_DV)  # [M, DV]
        dv = tl.dot(p.to(do.dtype), do, dv, allow_tf32=ALLOW_TF32)
        delta = tl.load(delta_base + offs_m, mask=offs_m < seqlen_q, other=0.0)
        dp = tl.dot(v, tl.trans(do), allow_tf32=ALLOW_TF32)  # [N, M]
        ds = p * (dp - delta[None, :])
        dk = tl.dot(ds.to(q.dtype), q, dk, allow_tf32=ALLOW_TF32)
        q_base += q_stride * BLOCK_M
        do_base += do_stride * BLOCK_M
    return dk, dv


@triton.jit
def bwd_dkdv(
    # pointers; the tables are null where a kind does not need them
    q_ptr, k_ptr, v_ptr, dout_ptr, lse_ptr, delta_ptr, dk_ptr, dv_ptr,
    starts_q_ptr, lengths_q_ptr, starts_k_ptr, lengths_k_ptr,
    # strides (batch, seqlen, head) in elements
    q_strides, k_strides, v_strides, dout_strides, dk_strides, dv_strides,
    # sizes and scalars
    batch, heads_q, heads_k, seqlen_q, seqlen_k, kind_q, kind_k, softmax_scale, window_left, window_right, top_left,
    # variant
    HEAD_DIM: tl.constexpr, HEAD_DIM_V: tl.constexpr, MASK: tl.constexpr, ALLOW_TF32: tl.constexpr,
    # tiles
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_DV: tl.constexpr,
):  # fmt: skip
    seq, off_hk, tile = tile_of(tl.program_id(0), heads_k, batch, seqlen_k, kind_k, starts_k_ptr, BLOCK_N)
    off_bq, start_q, _, used_q = rows_of(seq, batch, seqlen_q, kind_q, starts_q_ptr, lengths_q_ptr)
    off_bk, start_k, rows_k, used_k = rows_of(seq, batch, seqlen_k, kind_k, starts_k_ptr, lengths_k_ptr)
    start_n = tile * BLOCK_N
    used_q = tl.where(start_n < used_k, used_q, 0)
    left, right = window(used_q, used_k, window_left, window_right, top_left)
    group = heads_q // heads_k

    # Keys past the end have k = v = 0 and are not stored, or zeroed first, so they need no mask.
    offs_n = start_n + tl.arange(0, BLOCK_N)
    offs_d = tl.arange(0, BLOCK_D)
    offs_dv = tl.arange(0, BLOCK_DV)
    rows = offs_n.to(tl.int64)[:, None]
    k_base = row_base(k_ptr, k_strides, off_bk, start_k, off_hk)
    v_base = row_base(v_ptr, v_strides, off_bk, start_k, off_hk)
    k = load_rows(k_base + rows * k_strides[1] + offs_d[None, :], offs_n, used_k, offs_d, HEAD_DIM, BLOCK_D)
    v = load_rows(v_base + rows * v_strides[1] + offs_dv[None, :], offs_n, used_k, offs_dv, HEAD_DIM_V, BLOCK_DV)

    begin, whole, end, stop = queries_of(start_n, used_q, left, right, MASK, BLOCK_M, BLOCK_N)
    scale_log2 = softmax_scale * LOG2_E
    dk = tl.zeros([BLOCK_N, BLOCK_D], tl.float32)
    dv = tl.zeros([BLOCK_N, BLOCK_DV], tl.float32)
    for member in range(0, group):
        off_h = off_hk * group + member
        q_base = row_base(q_ptr, q_strides, off_bq, start_q, off_h)
        do_base = row_base(dout_ptr, dout_strides, off_bq, start_q, off_h)
        row = (off_bq * heads_q + off_h).to(tl.int64) * seqlen_q + start_q
        dk, dv = add_dkdv(
            dk, dv, k, v, q_base, do_base, lse_ptr + row, delta_ptr + row, q_strides[1], dout_strides[1], offs_n,
            begin, whole, end, stop, used_q, used_k, left, right, scale_log2,
            HEAD_DIM, HEAD_DIM_V, MASK, ALLOW_TF32, BLOCK_M, BLOCK_D, BLOCK_DV,
        )  # fmt: skip

    is_used = (offs_n < used_k)[:, None]
    dk = tl.where(is_used, dk * softmax_scale, 0.0).to(dk_ptr.dtype.element_ty)
    dv = tl.where(is_used, dv, 0.0).to(dv_ptr.dtype.element_ty)
    dk_base = row_base(dk_ptr, dk_strides, off_bk, start_k, off_hk)
    dv_base = row_base(dv_ptr, dv_strides, off_bk, start_k, off_hk)
    store_rows(dk_base + rows * dk_strides[1] + offs_d[None, :], dk, offs_n, rows_k, offs_d, HEAD_DIM, BLOCK_D)
    store_rows(dv_base + rows * dv_strides[1] + offs_dv[None, :], dv, offs_n, rows_k, offs_dv, HEAD_DIM_V, BLOCK_DV)


@triton.jit
def add_dq(
    dq, q, do, lse, delta, k_base, v_base, k_stride, v_stride, offs_m, begin, whole, end, stop, seqlen_k, left, right,
    scale_log2, HEAD_DIM: tl.constexpr, HEAD_DIM_V: tl.constexpr, MASK: tl.constexpr, ALLOW_TF32: tl.constexpr,
    BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_DV: tl.constexpr,
):  # fmt: skip
    """Add what keys begin..stop give to dq / scale. The queries see all keys whole..end, and those exist."""
    offs_d = tl.arange(0, BLOCK_D)
    offs_dv = tl.arange(0, BLOCK_DV)
    rows = tl.arange(0, BLOCK_N).to(tl.int64)[:, None]
    k_offs = rows * k_stride + offs_d[None, :]
    v_offs = rows * v_stride + offs_dv[None, :]
    k_base += begin * k_stride
    v_base += begin * v_stride
    for start_n in tl.range(begin, stop, BLOCK_N):
        offs_n = start_n + tl.arange(0, BLOCK_N)
        k = load_rows(k_base + k_offs, offs_n, seqlen_k, offs_d, HEAD_DIM, BLOCK_D)  # [N, D]
        v = load_rows(v_base + v_offs, offs_n, seqlen_k, offs_dv, HEAD_DIM_V, BLOCK_DV)  # [N, DV]
        s = tl.dot(q, tl.trans(k), allow_tf32=ALLOW_TF32) * scale_log2  # [M, N]
        p = weights(s, lse[:, None])
        if (start_n < whole) | (start_n >= end):
            p = tl.where(visible(offs_m[:, None], offs_n[None, :], seqlen_k, left, right, MASK), p, 0.0)
        dp = tl.dot(do, tl.trans(v), allow_tf32=ALLOW_TF32)  # [M, N]
        ds = p * (dp - delta[:, None])
        dq = tl.dot(ds.to(k.dtype), k, dq, allow_tf32=ALLOW_TF32)
        k_base += k_stride * BLOCK_N
        v_base += v_stride * BLOCK_N
    return dq


@triton.jit
def bwd_dq(
    # pointers; the tables are null where a kind does not need them
    q_ptr, k_ptr, v_ptr, dout_ptr, lse_ptr, delta_ptr, dq_ptr,
    starts_q_ptr, lengths_q_ptr, starts_k_ptr, lengths_k_ptr,
    # strides (batch, seqlen, head) in elements
    q_strides, k_strides, v_strides, dout_strides, dq_strides,
    # sizes and scalars
    batch, heads_q, heads_k, seqlen_q, seqlen_k, kind_q, kind_k, softmax_scale, window_left, window_right, top_left,
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
    rows = offs_m.to(tl.int64)[:, None]
    q_base = row_base(q_ptr, q_strides, off_bq, start_q, off_h)
    do_base = row_base(dout_ptr, dout_strides, off_bq, start_q, off_h)
    k_base = row_base(k_ptr, k_strides, off_bk, start_k, off_hk)
    v_base = row_base(v_ptr, v_strides, off_bk, start_k, off_hk)
    q = load_rows(q_base + rows * q_strides[1] + offs_d[None, :], offs_m, used_q, offs_d, HEAD_DIM, BLOCK_D)
    do_ptrs = do_base + rows * dout_strides[1] + offs_dv[None, :]
    do = load_rows(do_ptrs, offs_m, used_q, offs_dv, HEAD_DIM_V, BLOCK_DV)
    row = (off_bq * heads_q + off_h).to(tl.int64) * seqlen_q + start_q + offs_m
    lse = load_lse(lse_ptr + row, offs_m, used_q)
    delta = tl.load(delta_ptr + row, mask=offs_m < used_q, other=0.0)

    dq = tl.zeros([BLOCK_M, BLOCK_D], tl.float32)
    scale_log2 = softmax_scale * LOG2_E
    begin, whole, end, stop = keys_of(start_m, used_k, left, right, MASK, BLOCK_M, BLOCK_N)
    dq = add_dq(
        dq, q, do, lse, delta, k_base, v_base, k_strides[1], v_strides[1], offs_m, begin, whole, end, stop, used_k,
        left, right, scale_log2, HEAD_DIM, HEAD_DIM_V, MASK, ALLOW_TF32, BLOCK_N, BLOCK_D, BLOCK_DV,
    )  # fmt: skip
    dq_base = row_base(dq_ptr, dq_strides, off_bq, start_q, off_h)
    dq_ptrs = dq_base + rows * dq_strides[1] + offs_d[None, :]
    store_rows(dq_ptrs, (dq * softmax_scale).to(dq_ptr.dtype.element_ty), offs_m, rows_q, offs_d, HEAD_DIM, BLOCK_D)
