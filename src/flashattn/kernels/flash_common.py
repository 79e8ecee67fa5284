"""What the forward and backward kernels share: sequences in memory, masks, base-2 softmax, reading tiles of rows.

Where a sequence lies is run-time data, for queries and for keys alone: a `kind` and two tables of int32.

    kind            rows of sequence i in memory              of which used
    0               all of batch element i                    all
    PACKED          starts[i] up to starts[i + 1]             all
    + LENGTHS                                                 lengths[i]
    + DIFFERENCES                                             lengths[i + 1] - lengths[i]

Rows that are not used are never read, and zero in what a kernel writes. So are those behind the last packed sequence:
they count as one more sequence, of which nothing is used.
"""

import triton
import triton.language as tl

NEG_INF: tl.constexpr = tl.constexpr(float("-inf"))
LOG2_E: tl.constexpr = tl.constexpr(1.4426950408889634)
LN_2: tl.constexpr = tl.constexpr(0.6931471805599453)

# Bits of a kind.
PACKED: tl.constexpr = tl.constexpr(1)
LENGTHS: tl.constexpr = tl.constexpr(2)
DIFFERENCES: tl.constexpr = tl.constexpr(4)

# Masks. With i counted from the last key less the last query (or from 0): query i sees key j where
CAUSAL: tl.constexpr = tl.constexpr(1)  # j <= i + window_right
WINDOW: tl.constexpr = tl.constexpr(2)  # and i - window_left <= j


@triton.jit
def sequence_of(slot, batch, starts_ptr, BLOCK: tl.constexpr):
    """The sequence that a slot belongs to: the last one with starts[i] // BLOCK + i <= slot.

    That many slots hold the tiles of all sequences before it, and at most one slot a sequence stays empty.
    """
    first = batch * 0
    span = batch + 1
    while span > 1:
        step = tl.cdiv(span, 128)
        probe = first + tl.arange(0, 128) * step
        begins = tl.load(starts_ptr + probe, mask=probe <= batch, other=0) // BLOCK + probe
        first += (tl.sum(((begins <= slot) & (probe <= batch)).to(tl.int32), 0) - 1) * step
        span = tl.minimum(step, batch + 1 - first)
    return first


@triton.jit
def tile_of(pid, heads, batch, seqlen, kind, starts_ptr, BLOCK: tl.constexpr):
    """(sequence, head, tile of the sequence) of a program. A packed sequence may have one tile more than rows."""
    if kind & PACKED != 0:
        slots = seqlen // BLOCK + batch + 1
        slot = pid % slots
        head = pid // slots
        seq = sequence_of(slot, batch, starts_ptr, BLOCK)
        tile = slot - (tl.load(starts_ptr + seq) // BLOCK + seq)
    else:
        tiles = tl.cdiv(seqlen, BLOCK)
        tile = pid % tiles
        head = (pid // tiles) % heads
        seq = pid // tiles // heads
    return seq, head, tile


@triton.jit
def rows_of(seq, batch, seqlen, kind, starts_ptr, lengths_ptr):
    """(batch element, its first row, rows, rows used) of a sequence."""
    element = seq
    start = seq * 0
    rows = seqlen
    if kind & PACKED != 0:
        element = seq * 0
        start = tl.load(starts_ptr + seq)
        rows = tl.load(starts_ptr + seq + 1, mask=seq < batch, other=seqlen) - start
    used = rows
    if kind & LENGTHS != 0:
        used = tl.load(lengths_ptr + seq, mask=seq < batch, other=0)
        if kind & DIFFERENCES != 0:
            used = tl.load(lengths_ptr + seq + 1, mask=seq < batch, other=0) - used
    used = tl.where(seq < batch, tl.minimum(used, rows), 0)
    return element, start, rows, used


@triton.jit
def row_base(ptr, strides, element, start, head):
    """Where the first row of a sequence and head is."""
    return ptr + element.to(tl.int64) * strides[0] + start.to(tl.int64) * strides[1] + head.to(tl.int64) * strides[2]


@triton.jit
def load_rows(ptrs, offs_m, seqlen, offs_d, HEAD_DIM: tl.constexpr, BLOCK_D: tl.constexpr):
    """A tile [M, D] of rows; zeros past `seqlen` and past HEAD_DIM."""
    if HEAD_DIM == BLOCK_D:
        return tl.load(ptrs, mask=(offs_m < seqlen)[:, None], other=0.0)
    else:
        return tl.load(ptrs, mask=(offs_m < seqlen)[:, None] & (offs_d < HEAD_DIM)[None, :], other=0.0)


@triton.jit
def store_rows(ptrs, tile, offs_m, seqlen, offs_d, HEAD_DIM: tl.constexpr, BLOCK_D: tl.constexpr):
    """Write a tile [M, D] of rows, but nothing past `seqlen` or HEAD_DIM."""
    if HEAD_DIM == BLOCK_D:
        tl.store(ptrs, tile, mask=(offs_m < seqlen)[:, None])
    else:
        tl.store(ptrs, tile, mask=(offs_m < seqlen)[:, None] & (offs_d < HEAD_DIM)[None, :])


@triton.jit
def window(used_q, used_k, window_left, window_right, top_left):
    """(left, right): query i sees keys from i + left to i + right. Aligned at the last query and key, or the first."""
    shift = tl.where(top_left != 0, 0, used_k - used_q)
    return shift - window_left, shift + window_right


@triton.jit
def visible(i, j, seqlen_k, left, right, MASK: tl.constexpr):
    """Whether query i sees key j, for indices [M, 1] and [1, N], or [1, M] and [N, 1]."""
    keep = j < seqlen_k
    if MASK >= CAUSAL:
        keep = keep & (j <= i + right)
    if MASK == WINDOW:
        keep = keep & (j >= i + left)
    return keep


@triton.jit
def keys_of(start_m, seqlen_k, left, right, MASK: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr):
    """(begin, whole, end, stop): a tile of queries sees some of the keys begin..stop, all of the keys whole..end.

    All but `stop` are multiples of BLOCK_N, and begin <= whole <= end.
    """
    begin = 0
    whole = 0
    end = seqlen_k
    stop = seqlen_k
    if MASK >= CAUSAL:
        stop = tl.minimum(seqlen_k, start_m + BLOCK_M + right)
        end = tl.minimum(seqlen_k, tl.maximum(start_m + 1 + right, 0))
    end = (end // BLOCK_N) * BLOCK_N
    if MASK == WINDOW:
        begin = tl.minimum(tl.maximum(start_m + left, 0), seqlen_k) // BLOCK_N * BLOCK_N
        whole = tl.cdiv(tl.minimum(tl.maximum(start_m + BLOCK_M - 1 + left, 0), seqlen_k), BLOCK_N) * BLOCK_N
        end = tl.maximum(end, whole)
    return begin, whole, end, stop


@triton.jit
def queries_of(start_n, seqlen_q, left, right, MASK: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr):
    """(begin, whole, end, stop): a tile of keys is seen by some of the queries begin..stop, by all of whole..end.

    All but the last two are multiples of BLOCK_M, as `end` is where it is not `stop`; begin <= whole <= end.
    """
    begin = 0
    whole = 0
    end = seqlen_q
    stop = seqlen_q
    if MASK >= CAUSAL:
        last = tl.cdiv(seqlen_q, BLOCK_M) * BLOCK_M
        begin = tl.minimum(tl.maximum(start_n - right, 0) // BLOCK_M * BLOCK_M, last)
        whole = tl.minimum(tl.cdiv(tl.maximum(start_n + BLOCK_N - 1 - right, 0), BLOCK_M) * BLOCK_M, last)
    if MASK == WINDOW:
        stop = tl.minimum(seqlen_q, tl.maximum(start_n + BLOCK_N - left, 0))
        end = tl.minimum(seqlen_q, tl.maximum(start_n + 1 - left, 0)) // BLOCK_M * BLOCK_M
        end = tl.maximum(end, whole)
    return begin, whole, end, stop


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
