"""Attention backward. With P = exp(S - LSE), S = scale * Q K^T and delta = rowsum(dO * O) - dLSE:

    dV = P^T dO,   dS = P * (dO V^T - delta),   dQ = scale * dS K,   dK = scale * dS^T Q.

`bwd_preprocess` computes delta; one program of `bwd_dkdv` owns BLOCK_N keys of one key head and walks over the queries
that see them, of every query head of its group; one program of `bwd_dq` owns BLOCK_M queries. Nothing is added
atomically, so the results do not depend on timing.
"""

import triton
import triton.language as tl

from .flash_common import LOG2_E, load_rows, store_rows, visible


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
    out = load_rows(
        out_base + rows * out_strides[1] + offs_d[None, :], offs_m, seqlen_q, offs_d, HEAD_DIM_V, BLOCK_DV, True
    )
    dout = load_rows(
        dout_base + rows * dout_strides[1] + offs_d[None, :], offs_m, seqlen_q, offs_d, HEAD_DIM_V, BLOCK_DV, True
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
    dk, dv, k, v, q_base, do_base, lse_base, delta_base, q_stride, do_stride, offs_n, start, stop, seqlen_q, seqlen_k,
    scale_log2, HEAD_DIM: tl.constexpr, HEAD_DIM_V: tl.constexpr, IS_CAUSAL: tl.constexpr, ALLOW_TF32: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_DV: tl.constexpr,
):  # fmt: skip
    """Add what queries start..stop give to dk / scale and dv. Without IS_CAUSAL they see all the keys."""
    offs_d = tl.arange(0, BLOCK_D)
    offs_dv = tl.arange(0, BLOCK_DV)
    # Only the scalar bases move: a tile of pointers that lives across the loops costs registers in two layouts.
    rows = tl.arange(0, BLOCK_M).to(tl.int64)[:, None]
    q_offs = rows * q_stride + offs_d[None, :]
    do_offs = rows * do_stride + offs_dv[None, :]
    q_base += start * q_stride
    do_base += start * do_stride
    for start_m in tl.range(start, stop, BLOCK_M):
        offs_m = start_m + tl.arange(0, BLOCK_M)
        # A query past the end has q = do = 0 and lse = +inf: its weights are 0 without a mask.
        q = load_rows(q_base + q_offs, offs_m, seqlen_q, offs_d, HEAD_DIM, BLOCK_D, True)  # [M, D]
        lse = load_lse(lse_base + offs_m, offs_m, seqlen_q)
        s = tl.dot(k, tl.trans(q), allow_tf32=ALLOW_TF32) * scale_log2  # [N, M]
        p = weights(s, lse[None, :])
        if IS_CAUSAL:
            p = tl.where(offs_n[:, None] <= offs_m[None, :] + (seqlen_k - seqlen_q), p, 0.0)
        do = load_rows(do_base + do_offs, offs_m, seqlen_q, offs_dv, HEAD_DIM_V, BLOCK_DV, True)  # [M, DV]
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
    # pointers
    q_ptr, k_ptr, v_ptr, dout_ptr, lse_ptr, delta_ptr, dk_ptr, dv_ptr,
    # strides (batch, seqlen, head) in elements
    q_strides, k_strides, v_strides, dout_strides, dk_strides, dv_strides,
    # sizes and scalars
    heads_q, heads_k, seqlen_q, seqlen_k, softmax_scale,
    # variant
    HEAD_DIM: tl.constexpr, HEAD_DIM_V: tl.constexpr, IS_CAUSAL: tl.constexpr, ALLOW_TF32: tl.constexpr,
    # tiles
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_DV: tl.constexpr,
):  # fmt: skip
    tiles = tl.cdiv(seqlen_k, BLOCK_N)
    pid = tl.program_id(0)
    start_n = (pid % tiles) * BLOCK_N
    off_hk = (pid // tiles) % heads_k
    off_b = (pid // tiles) // heads_k
    group = heads_q // heads_k

    # Keys past the end have k = v = 0 and are not stored, so they need no mask.
    offs_n = start_n + tl.arange(0, BLOCK_N)
    offs_d = tl.arange(0, BLOCK_D)
    offs_dv = tl.arange(0, BLOCK_DV)
    rows = offs_n.to(tl.int64)[:, None]
    k_base = k_ptr + off_b.to(tl.int64) * k_strides[0] + off_hk.to(tl.int64) * k_strides[2]
    v_base = v_ptr + off_b.to(tl.int64) * v_strides[0] + off_hk.to(tl.int64) * v_strides[2]
    k = load_rows(k_base + rows * k_strides[1] + offs_d[None, :], offs_n, seqlen_k, offs_d, HEAD_DIM, BLOCK_D, True)
    v = load_rows(
        v_base + rows * v_strides[1] + offs_dv[None, :], offs_n, seqlen_k, offs_dv, HEAD_DIM_V, BLOCK_DV, True
    )

    # Queries from `begin` on see some of the keys, those from `full` on all of them.
    begin = 0
    full = 0
    if IS_CAUSAL:
        shift = seqlen_q - seqlen_k
        begin = (tl.maximum(start_n + shift, 0) // BLOCK_M) * BLOCK_M
        full = tl.cdiv(tl.maximum(start_n + BLOCK_N - 1 + shift, 0), BLOCK_M) * BLOCK_M
        full = tl.minimum(full, tl.cdiv(seqlen_q, BLOCK_M) * BLOCK_M)
    scale_log2 = softmax_scale * LOG2_E

    dk = tl.zeros([BLOCK_N, BLOCK_D], tl.float32)
    dv = tl.zeros([BLOCK_N, BLOCK_DV], tl.float32)
    for member in range(0, group):
        off_h = off_hk * group + member
        q_base = q_ptr + off_b.to(tl.int64) * q_strides[0] + off_h.to(tl.int64) * q_strides[2]
        do_base = dout_ptr + off_b.to(tl.int64) * dout_strides[0] + off_h.to(tl.int64) * dout_strides[2]
        row = (off_b * heads_q + off_h).to(tl.int64) * seqlen_q
        if IS_CAUSAL:
            dk, dv = add_dkdv(
                dk, dv, k, v, q_base, do_base, lse_ptr + row, delta_ptr + row, q_strides[1], dout_strides[1], offs_n,
                begin, full, seqlen_q, seqlen_k, scale_log2,
                HEAD_DIM, HEAD_DIM_V, True, ALLOW_TF32, BLOCK_M, BLOCK_D, BLOCK_DV,
            )  # fmt: skip
        dk, dv = add_dkdv(
            dk, dv, k, v, q_base, do_base, lse_ptr + row, delta_ptr + row, q_strides[1], dout_strides[1], offs_n,
            full, seqlen_q, seqlen_q, seqlen_k, scale_log2,
            HEAD_DIM, HEAD_DIM_V, False, ALLOW_TF32, BLOCK_M, BLOCK_D, BLOCK_DV,
        )  # fmt: skip

    dk_base = dk_ptr + off_b.to(tl.int64) * dk_strides[0] + off_hk.to(tl.int64) * dk_strides[2]
    dv_base = dv_ptr + off_b.to(tl.int64) * dv_strides[0] + off_hk.to(tl.int64) * dv_strides[2]
    dk = (dk * softmax_scale).to(dk_ptr.dtype.element_ty)
    store_rows(dk_base + rows * dk_strides[1] + offs_d[None, :], dk, offs_n, seqlen_k, offs_d, HEAD_DIM, BLOCK_D)
    dv = dv.to(dv_ptr.dtype.element_ty)
    store_rows(dv_base + rows * dv_strides[1] + offs_dv[None, :], dv, offs_n, seqlen_k, offs_dv, HEAD_DIM_V, BLOCK_DV)


@triton.jit
def add_dq(
    dq, q, do, lse, delta, k_base, v_base, k_stride, v_stride, offs_m, start, stop, seqlen_q, seqlen_k, scale_log2,
    HEAD_DIM: tl.constexpr, HEAD_DIM_V: tl.constexpr, IS_CAUSAL: tl.constexpr, ALLOW_TF32: tl.constexpr,
    CHECK: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_DV: tl.constexpr,
):  # fmt: skip
    """Add what keys start..stop give to dq / scale. Without CHECK they all exist and every query sees them."""
    offs_d = tl.arange(0, BLOCK_D)
    offs_dv = tl.arange(0, BLOCK_DV)
    rows = tl.arange(0, BLOCK_N).to(tl.int64)[:, None]
    k_offs = rows * k_stride + offs_d[None, :]
    v_offs = rows * v_stride + offs_dv[None, :]
    k_base += start * k_stride
    v_base += start * v_stride
    for start_n in tl.range(start, stop, BLOCK_N):
        offs_n = start_n + tl.arange(0, BLOCK_N)
        k = load_rows(k_base + k_offs, offs_n, seqlen_k, offs_d, HEAD_DIM, BLOCK_D, CHECK)  # [N, D]
        v = load_rows(v_base + v_offs, offs_n, seqlen_k, offs_dv, HEAD_DIM_V, BLOCK_DV, CHECK)  # [N, DV]
        s = tl.dot(q, tl.trans(k), allow_tf32=ALLOW_TF32) * scale_log2  # [M, N]
        p = weights(s, lse[:, None])
        if CHECK:
            p = tl.where(visible(offs_m, offs_n, seqlen_q, seqlen_k, IS_CAUSAL), p, 0.0)
        dp = tl.dot(do, tl.trans(v), allow_tf32=ALLOW_TF32)  # [M, N]
        ds = p * (dp - delta[:, None])
        dq = tl.dot(ds.to(k.dtype), k, dq, allow_tf32=ALLOW_TF32)
        k_base += k_stride * BLOCK_N
        v_base += v_stride * BLOCK_N
    return dq


@triton.jit
def bwd_dq(
    # pointers
    q_ptr, k_ptr, v_ptr, dout_ptr, lse_ptr, delta_ptr, dq_ptr,
    # strides (batch, seqlen, head) in elements
    q_strides, k_strides, v_strides, dout_strides, dq_strides,
    # sizes and scalars
    heads_q, heads_k, seqlen_q, seqlen_k, softmax_scale,
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
    rows = offs_m.to(tl.int64)[:, None]
    q_base = q_ptr + off_b.to(tl.int64) * q_strides[0] + off_h.to(tl.int64) * q_strides[2]
    do_base = dout_ptr + off_b.to(tl.int64) * dout_strides[0] + off_h.to(tl.int64) * dout_strides[2]
    k_base = k_ptr + off_b.to(tl.int64) * k_strides[0] + off_hk.to(tl.int64) * k_strides[2]
    v_base = v_ptr + off_b.to(tl.int64) * v_strides[0] + off_hk.to(tl.int64) * v_strides[2]
    q = load_rows(q_base + rows * q_strides[1] + offs_d[None, :], offs_m, seqlen_q, offs_d, HEAD_DIM, BLOCK_D, True)
    do_ptrs = do_base + rows * dout_strides[1] + offs_dv[None, :]
    do = load_rows(do_ptrs, offs_m, seqlen_q, offs_dv, HEAD_DIM_V, BLOCK_DV, True)
    row = (off_b * heads_q + off_h).to(tl.int64) * seqlen_q + offs_m
    lse = load_lse(lse_ptr + row, offs_m, seqlen_q)
    delta = tl.load(delta_ptr + row, mask=offs_m < seqlen_q, other=0.0)

    # Keys up to `full` are seen by every query of the tile; those up to `stop` by some.
    stop = seqlen_k
    full = seqlen_k
    if IS_CAUSAL:
        shift = seqlen_k - seqlen_q
        stop = tl.minimum(seqlen_k, start_m + BLOCK_M + shift)
        full = tl.minimum(seqlen_k, tl.maximum(start_m + 1 + shift, 0))
    full = (full // BLOCK_N) * BLOCK_N

    dq = tl.zeros([BLOCK_M, BLOCK_D], tl.float32)
    scale_log2 = softmax_scale * LOG2_E
    dq = add_dq(
        dq, q, do, lse, delta, k_base, v_base, k_strides[1], v_strides[1], offs_m, 0, full, seqlen_q, seqlen_k,
        scale_log2, HEAD_DIM, HEAD_DIM_V, IS_CAUSAL, ALLOW_TF32, False, BLOCK_N, BLOCK_D, BLOCK_DV,
    )  # fmt: skip
    dq = add_dq(
        dq, q, do, lse, delta, k_base, v_base, k_strides[1], v_strides[1], offs_m, full, stop, seqlen_q, seqlen_k,
        scale_log2, HEAD_DIM, HEAD_DIM_V, IS_CAUSAL, ALLOW_TF32, True, BLOCK_N, BLOCK_D, BLOCK_DV,
    )  # fmt: skip
    dq_base = dq_ptr + off_b.to(tl.int64) * dq_strides[0] + off_h.to(tl.int64) * dq_strides[2]
    dq_ptrs = dq_base + rows * dq_strides[1] + offs_d[None, :]
    store_rows(dq_ptrs, (dq * softmax_scale).to(dq_ptr.dtype.element_ty), offs_m, seqlen_q, offs_d, HEAD_DIM, BLOCK_D)
