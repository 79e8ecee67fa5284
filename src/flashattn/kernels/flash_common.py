"""What the forward and backward kernels share: base-2 softmax, the mask, and reading tiles of rows."""

import triton
import triton.language as tl

NEG_INF: tl.constexpr = tl.constexpr(float("-inf"))
LOG2_E: tl.constexpr = tl.constexpr(1.4426950408889634)
LN_2: tl.constexpr = tl.constexpr(0.6931471805599453)


@triton.jit
def load_rows(ptrs, offs_m, seqlen, offs_d, HEAD_DIM: tl.constexpr, BLOCK_D: tl.constexpr, CHECK_ROWS: tl.constexpr):
    """A tile [M, D] of rows; zeros past `seqlen` (if CHECK_ROWS) and past HEAD_DIM."""
    if CHECK_ROWS:
        if HEAD_DIM == BLOCK_D:
            return tl.load(ptrs, mask=(offs_m < seqlen)[:, None], other=0.0)
        else:
            return tl.load(ptrs, mask=(offs_m < seqlen)[:, None] & (offs_d < HEAD_DIM)[None, :], other=0.0)
    else:
        if HEAD_DIM == BLOCK_D:
            return tl.load(ptrs)
        else:
            return tl.load(ptrs, mask=(offs_d < HEAD_DIM)[None, :], other=0.0)


@triton.jit
def store_rows(ptrs, tile, offs_m, seqlen, offs_d, HEAD_DIM: tl.constexpr, BLOCK_D: tl.constexpr):
    """Write a tile [M, D] of rows, but nothing past `seqlen` or HEAD_DIM."""
    if HEAD_DIM == BLOCK_D:
        tl.store(ptrs, tile, mask=(offs_m < seqlen)[:, None])
    else:
        tl.store(ptrs, tile, mask=(offs_m < seqlen)[:, None] & (offs_d < HEAD_DIM)[None, :])


@triton.jit
def visible(offs_m, offs_n, seqlen_q, seqlen_k, IS_CAUSAL: tl.constexpr):
    """Whether query m [M] sees key n [N], [M, N]. Causal is aligned bottom-right: the last query sees every key."""
    keep = (offs_n < seqlen_k)[None, :]
    if IS_CAUSAL:
        keep = keep & (offs_n[None, :] <= offs_m[:, None] + (seqlen_k - seqlen_q))
    return keep


@triton.jit
def online_softmax(s, m, l):
    """Fold one tile of base-2 scores s [M, N] into the running maximum m [M] and sum l [M].

    Returns p = 2^(s - m'), alpha = 2^(m - m'), m', l'; whatever was summed before must be multiplied by alpha.
    """
    m_new = tl.maximum(m, tl.max(s, 1))
    # A row without a visible key has m' = -inf; subtract 0 there, since -inf - -inf is NaN.
    pivot = tl.where(m_new == NEG_INF, 0.0, m_new)
    p = tl.exp2(s - pivot[:, None])  # [M, N]
    alpha = tl.exp2(m - pivot)
    return p, alpha, m_new, l * alpha + tl.sum(p, 1)
