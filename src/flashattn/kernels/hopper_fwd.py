"""Attention forward on NVIDIA Hopper: O = softmax(scale * Q K^T) V, LSE = log sum exp(scale * Q K^T).

Every program takes tiles of BLOCK_M queries of one query head until none is left. Its producer warp asks for the tiles
and copies Q, K and V to shared memory; each of its BLOCK_M / 64 consumer warpgroups owns 64 of its rows, walks over
the keys they see from the last block to the first, and writes O and LSE. See `hopper_attn_fwd` for what a launch needs.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from .hopper_common import (
    Barriers,
    Buffers,
    Descriptors,
    Work,
    copy_out,
    parts,
    pass_turn,
    row_sums,
    slot_of,
    take_turn,
    taken_tile,
    tile_at,
    visible_blocks,
)
from .hopper_producer import producer
from .hopper_softmax import NO_KEY, hide, rescale, scale_of, store_lse, weights


@gluon.jit
def scores(q, k):
    """Start S = Q K^T [64, N]: a sum over the parts of head_dim."""
    BLOCK_N: gl.constexpr = k[0].shape[0]
    LAYOUT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BLOCK_N, 16])
    s = gl.zeros([64, BLOCK_N], gl.float32, LAYOUT)
    for i in gl.static_range(len(q)):
        s = warpgroup_mma(q[i], k[i].permute([1, 0]), s, use_acc=i > 0, is_async=True)
    return s


@gluon.jit
def add_values(p, v, acc):
    """Start O += P V in each part of head_dim_v."""
    out = ()
    for i in gl.static_range(len(acc)):
        weights = gl.convert_layout(p, gl.DotOperandLayout(0, acc[i].type.layout, 2))
        out = out + (warpgroup_mma(weights, v[i], acc[i], is_async=True),)
    return out


@gluon.jit
def step(
    q, k, v, v_full, v_phase, k_empty, v_empty, m, l, acc, p, row, start_n, partly, work, scale,
    WARPGROUP: gl.constexpr, WARPGROUPS: gl.constexpr, IS_CAUSAL: gl.constexpr, PING_PONG: gl.constexpr,
):  # fmt: skip
    """Fold one block of keys into m, l: S = Q K^T beside O += P V of the block before, then this block's P."""
    DTYPE: gl.constexpr = p.dtype
    if PING_PONG:
        take_turn(WARPGROUP, WARPGROUPS)
    s = scores(q, k)
    mbarrier.wait(v_full, v_phase)
    acc = add_values(p, v, acc)
    if PING_PONG:
        pass_turn(WARPGROUP, WARPGROUPS)
    s = warpgroup_mma_wait(len(acc), (s,))
    mbarrier.arrive(k_empty, count=1)
    if IS_CAUSAL:
        if partly:
            s = hide(s, row, start_n, work, IS_CAUSAL)
    w, m_new = weights(s, m, scale)  # [64, N]
    alpha = gl.exp2(m - m_new)
    l = gl.fma(l, gl.convert_layout(alpha, gl.SliceLayout(1, l.type.layout))[:, None], row_sums(w))
    # P must not be rounded to its registers before the product that reads the last one is done.
    done = warpgroup_mma_wait(0, acc + (w,))
    mbarrier.arrive(v_empty, count=1)
    acc = rescale(done[0 : len(acc)], alpha)
    p = gl.convert_layout(done[len(acc)].to(DTYPE), p.type.layout)
    return m_new, l, acc, p


@gluon.jit
def slot(bufs, i):
    """Slot i of a ring: a tuple of tiles [N, D], one a part of head_dim."""
    out = ()
    for n in gl.static_range(len(bufs)):
        tile = bufs[n].index(i)
        out = out + (tile.reshape([tile.shape[1], tile.shape[3]]),)
    return out


@gluon.jit
def walk(
    q, bufs, bars, m, l, acc, p, count, row, stop, full, work, scale,
    WARPGROUP: gl.constexpr, WARPGROUPS: gl.constexpr, IS_CAUSAL: gl.constexpr, PING_PONG: gl.constexpr,
    Q_REGS: gl.constexpr,
):  # fmt: skip
    """Blocks stop - 1 ... 0; all queries see those before block `full`."""
    STAGES: gl.constexpr = bufs.k[0].shape[0]
    BLOCK_N: gl.constexpr = bufs.k[0].shape[2]
    block = stop - 1
    while block >= 0:
        k_at, k_phase = slot_of(count, STAGES)
        v_at, v_phase = slot_of(count - 1, STAGES)
        mbarrier.wait(bars.k_full.index(k_at), k_phase)
        m, l, acc, p = step(
            q, parts(slot(bufs.k, k_at), Q_REGS), slot(bufs.v, v_at), bars.v_full.index(v_at), v_phase,
            bars.k_empty.index(k_at), bars.v_empty.index(v_at), m, l, acc, p, row, block * BLOCK_N, block >= full,
            work, scale, WARPGROUP, WARPGROUPS, IS_CAUSAL, PING_PONG,
        )  # fmt: skip
        count += 1
        block -= 1
    return m, l, acc, p, count


@gluon.jit
def skip(blocks, own, bars, count, WARPGROUP: gl.constexpr, WARPGROUPS: gl.constexpr, PING_PONG: gl.constexpr):
    """Release the tile's last blocks, which this warpgroup's rows do not see; it needs the first `own` of `blocks`."""
    left = blocks
    while left > own:
        if PING_PONG:
            # The first block of a warpgroup takes no turn.
            if (own > 0) | (left < blocks):
                take_turn(WARPGROUP, WARPGROUPS)
                pass_turn(WARPGROUP, WARPGROUPS)
        at, phase = slot_of(count, bars.k_full.shape[0])
        mbarrier.wait(bars.k_full.index(at), phase)
        mbarrier.arrive(bars.k_empty.index(at), count=1)
        mbarrier.wait(bars.v_full.index(at), phase)
        mbarrier.arrive(bars.v_empty.index(at), count=1)
        count += 1
        left -= 1
    return count


@gluon.jit
def negate(tiles):
    """Change the sign of tiles in shared memory."""
    LAYOUT: gl.constexpr = gl.BlockedLayout([1, 8], [8, 4], [4, 1], [1, 0])
    for i in gl.static_range(len(tiles)):
        tiles[i].store(-tiles[i].load(LAYOUT))
    fence_async_shared()


@gluon.jit
def query_parts(tiles, Q_REGS: gl.constexpr, BLOCK_N: gl.constexpr):
    """The operands of S: Q in shared memory, but for its first Q_REGS columns, which are read to registers."""
    if Q_REGS == 0:
        return tiles
    else:
        split = parts(tiles, Q_REGS)
        LAYOUT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BLOCK_N, 16])
        return (split[0].load(gl.DotOperandLayout(0, LAYOUT, 2)),) + split[1 : len(split)]


@gluon.jit
def store_out(acc, l, descs, tiles, staging, off_bh, row, work, O_WIDTH: gl.constexpr):
    """Start the stores of O = acc / l: through the tiles of Q if O_WIDTH is 0, else O_WIDTH columns at a time."""
    off_b = off_bh // work.heads_q
    off_h = off_bh - off_b * work.heads_q
    for i in gl.static_range(len(acc)):
        l_i = gl.convert_layout(l, gl.SliceLayout(1, acc[i].type.layout))
        # A row without a key has l = 0 and acc = 0: its output is 0.
        out = (acc[i] * (1.0 / gl.where(l_i == 0.0, 1.0, l_i))[:, None]).to(descs[0].dtype)
        if O_WIDTH == 0:
            tiles[i].store(out)
        else:
            store_staged(out, descs[0], staging, off_b, row, off_h, i * acc[0].shape[1], O_WIDTH)
    if O_WIDTH == 0:
        fence_async_shared()
        for i in gl.static_range(len(acc)):
            tile = tiles[i].reshape([1, 64, 1, acc[i].shape[1]])
            copy_out(descs[i], [off_b, row, off_h, i * acc[0].shape[1]], tile)


@gluon.jit
def store_staged(o, desc, staging, b, row, h, column, O_WIDTH: gl.constexpr):
    """Store o [64, D] from `column` on, O_WIDTH columns at a time through one small buffer."""
    if o.shape[1] > O_WIDTH:
        HALF: gl.constexpr = o.shape[1] // 2
        low, high = gl.split(o.reshape([64, 2, HALF]).permute([0, 2, 1]))
        LAYOUT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, HALF, 16])
        store_staged(gl.convert_layout(low, LAYOUT), desc, staging, b, row, h, column, O_WIDTH)
        store_staged(gl.convert_layout(high, LAYOUT), desc, staging, b, row, h, column + HALF, O_WIDTH)
    else:
        tma.store_wait(0)
        staging.reshape([64, O_WIDTH]).store(o)
        fence_async_shared()
        copy_out(desc, [b, row, h, column], staging)


@gluon.jit
def no_values(D: gl.constexpr):
    """A part of O to start with."""
    return gl.zeros([64, D], gl.float32, gl.NVMMADistributedLayout([3, 0], [4, 1], [16, D, 16]))


@gluon.jit
def attend(
    tiles, bufs, bars, free_q, count, row, own, work, scale,
    WARPGROUP: gl.constexpr, WARPGROUPS: gl.constexpr, IS_CAUSAL: gl.constexpr, PING_PONG: gl.constexpr,
    Q_REGS: gl.constexpr, O_WIDTH: gl.constexpr,
):  # fmt: skip
    """m, l and O, its last product still under way, of 64 queries over the first `own` blocks of keys."""
    STAGES: gl.constexpr = bufs.k[0].shape[0]
    BLOCK_N: gl.constexpr = bufs.k[0].shape[2]
    if work.softmax_scale < 0:
        negate(tiles)
    q = query_parts(tiles, Q_REGS, BLOCK_N)
    at, phase = slot_of(count, STAGES)
    mbarrier.wait(bars.k_full.index(at), phase)
    s = scores(q, parts(slot(bufs.k, at), Q_REGS))
    if O_WIDTH == 0:
        # The other tile of Q held the last tile's O, which has been read out by now.
        tma.store_wait(0)
        mbarrier.arrive(free_q, count=1)
    s = warpgroup_mma_wait(0, (s,))
    mbarrier.arrive(bars.k_empty.index(at), count=1)
    full = work.seqlen_k // BLOCK_N
    if IS_CAUSAL:
        full = gl.minimum(gl.maximum(row + work.diagonal + 1, 0), work.seqlen_k) // BLOCK_N
    if own > full:
        s = hide(s, row, (own - 1) * BLOCK_N, work, IS_CAUSAL)
    w, m = weights(s, gl.full([64], NO_KEY, gl.float32, gl.SliceLayout(1, s.type.layout)), scale)
    l = row_sums(w)
    acc = ()
    for i in gl.static_range(len(bufs.v)):
        acc = acc + (no_values(bufs.v[i].shape[4]),)
    p = gl.convert_layout(w.to(tiles[0].dtype), gl.DotOperandLayout(0, acc[0].type.layout, 2))
    m, l, acc, p, count = walk(
        q, bufs, bars, m, l, acc, p, count + 1, row, own - 1, full, work, scale,
        WARPGROUP, WARPGROUPS, IS_CAUSAL, PING_PONG, Q_REGS,
    )  # fmt: skip
    if O_WIDTH > 0:
        mbarrier.arrive(free_q, count=1)
    at, phase = slot_of(count - 1, STAGES)
    mbarrier.wait(bars.v_full.index(at), phase)
    acc = add_values(p, slot(bufs.v, at), acc)
    return m, gl.convert_layout(gl.sum(l, 1), m.type.layout), acc, count


@gluon.jit
def consumer(
    descs, bufs, bars, work, WARPGROUP: gl.constexpr, WARPGROUPS: gl.constexpr, IS_CAUSAL: gl.constexpr,
    Q_STAGES: gl.constexpr, O_WIDTH: gl.constexpr, PING_PONG: gl.constexpr, Q_REGS: gl.constexpr,
):  # fmt: skip
    """The warpgroup that owns rows 64 * WARPGROUP ... of every tile."""
    BLOCK_M: gl.constexpr = 64 * WARPGROUPS
    BLOCK_N: gl.constexpr = bufs.k[0].shape[2]
    scale = scale_of(work.softmax_scale)
    if PING_PONG and WARPGROUP == WARPGROUPS - 1:
        pass_turn(WARPGROUP, WARPGROUPS)
    count = 0
    turn = 0
    tile = gl.program_id(0)
    while tile < work.total:
        start_m, off_bh = tile_at(tile, work, IS_CAUSAL)
        row = start_m * BLOCK_M + WARPGROUP * 64
        blocks = visible_blocks((start_m + 1) * BLOCK_M, work, BLOCK_N, IS_CAUSAL)
        own = visible_blocks(row + 64, work, BLOCK_N, IS_CAUSAL)
        if row >= work.seqlen_q:
            own = own * 0
        count = skip(blocks, own, bars, count, WARPGROUP, WARPGROUPS, PING_PONG)
        q_at, q_phase = slot_of(turn, Q_STAGES)
        # The tile of Q to give back: this one, or the other, through which the last O leaves.
        free_q = bars.q_empty.index((q_at if O_WIDTH > 0 else q_at ^ 1) * WARPGROUPS + WARPGROUP)
        mbarrier.wait(bars.q_full.index(q_at * WARPGROUPS + WARPGROUP), q_phase)
        if own > 0:
            tiles = slot(bufs.q, q_at * WARPGROUPS + WARPGROUP)
            m, l, acc, count = attend(
                tiles, bufs, bars, free_q, count, row, own, work, scale,
                WARPGROUP, WARPGROUPS, IS_CAUSAL, PING_PONG, Q_REGS, O_WIDTH,
            )  # fmt: skip
            if work.write_lse != 0:
                store_lse(m, l, off_bh, row, work, scale)
            acc = wait_all(acc)
            mbarrier.arrive(bars.v_empty.index((count - 1) & (bars.v_empty.shape[0] - 1)), count=1)
            store_out(acc, l, descs.out, tiles, bufs.o[0].index(WARPGROUP), off_bh, row, work, O_WIDTH)
        else:
            if O_WIDTH == 0:
                tma.store_wait(0)
            mbarrier.arrive(free_q, count=1)
        tile = taken_tile(bufs, bars, turn)
        turn += 1
    tma.store_wait(0)


@gluon.jit
def wait_all(acc):
    """What the products under way came to."""
    done = warpgroup_mma_wait(0, acc)
    if len(acc) == 1:
        return (done,)
    else:
        return done


@gluon.jit
def new_ring(descs, SLOTS: gl.constexpr):
    """Shared memory for SLOTS tiles of each descriptor."""
    bufs = ()
    for i in gl.static_range(len(descs)):
        bufs = bufs + (gl.allocate_shared_memory(descs[i].dtype, [SLOTS] + descs[i].block_type.shape, descs[i].layout),)
    return bufs


@gluon.jit
def new_barriers(SLOTS: gl.constexpr, ARRIVALS: gl.constexpr):
    """A barrier for each of SLOTS, done after ARRIVALS arrivals."""
    bars = gl.allocate_shared_memory(gl.int64, [SLOTS, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(SLOTS):
        mbarrier.init(bars.index(i), count=ARRIVALS)
    return bars


@gluon.jit
def hopper_attn_fwd(
    # tuples of tensor maps, see `hopper_boxes`; pointers: lse is null unless write_lse
    q_descs, k_descs, v_descs, out_descs, lse_ptr, counter_ptr,
    # sizes and scalars
    batch, heads_q, heads_k, seqlen_q, seqlen_k, diagonal, softmax_scale, write_lse, section,
    # variant
    HEAD_DIM: gl.constexpr, HEAD_DIM_V: gl.constexpr, IS_CAUSAL: gl.constexpr,
    # tiles
    BLOCK_M: gl.constexpr, BLOCK_N: gl.constexpr, STAGES: gl.constexpr, Q_STAGES: gl.constexpr, O_WIDTH: gl.constexpr,
    PING_PONG: gl.constexpr, DEFER_V: gl.constexpr, Q_REGS: gl.constexpr,
):  # fmt: skip
    """Key j is visible to query i if j < seqlen_k and, with IS_CAUSAL, j <= i + diagonal (which may be negative).

    The grid: any number of programs, best one for each multiprocessor.
    counter_ptr: an int32 that is 0 before the launch, and 0 again after it. It must belong to this launch alone until
        then: one counter for each stream, and one of its own, zeroed in the graph, for each launch in a CUDA graph.
    section: how many heads' tiles are taken before any of the next heads: their keys and values share the L2 cache.
    """
    WARPGROUPS: gl.constexpr = BLOCK_M // 64
    rows = batch * heads_q
    tiles_m = gl.cdiv(seqlen_q, BLOCK_M)
    work = Work(
        lse_ptr, write_lse, softmax_scale, heads_q, heads_q // heads_k, seqlen_q, seqlen_k, diagonal,
        tiles_m, rows, section, tiles_m * rows,
    )  # fmt: skip
    q_bufs = new_ring(q_descs, Q_STAGES * WARPGROUPS)
    out_bufs = q_bufs if O_WIDTH == 0 else new_ring(out_descs, WARPGROUPS)
    tile_buf = gl.allocate_shared_memory(gl.int32, [2, 1], gl.SwizzledSharedLayout(1, 1, 1, [0]))
    bufs = Buffers(q_bufs, new_ring(k_descs, STAGES), new_ring(v_descs, STAGES), out_bufs, tile_buf)
    bars = Barriers(
        new_barriers(Q_STAGES * WARPGROUPS, 1), new_barriers(Q_STAGES * WARPGROUPS, 1),
        new_barriers(STAGES, 1), new_barriers(STAGES, WARPGROUPS),
        new_barriers(STAGES, 1), new_barriers(STAGES, WARPGROUPS),
        new_barriers(2, 1), new_barriers(2, WARPGROUPS),
    )  # fmt: skip
    fence_async_shared()
    descs = Descriptors(q_descs, k_descs, v_descs, out_descs)
    if WARPGROUPS == 2:
        gl.warp_specialize([
            (consumer, (descs, bufs, bars, work, 0, 2, IS_CAUSAL, Q_STAGES, O_WIDTH, PING_PONG, Q_REGS)),
            (consumer, (descs, bufs, bars, work, 1, 2, IS_CAUSAL, Q_STAGES, O_WIDTH, PING_PONG, Q_REGS)),
            (producer, (descs, bufs, bars, counter_ptr, work, 2, IS_CAUSAL, Q_STAGES, DEFER_V)),
        ], [4, 1], [240, 24])  # fmt: skip
    else:
        gl.warp_specialize([
            (consumer, (descs, bufs, bars, work, 0, 3, IS_CAUSAL, Q_STAGES, O_WIDTH, PING_PONG, Q_REGS)),
            (consumer, (descs, bufs, bars, work, 1, 3, IS_CAUSAL, Q_STAGES, O_WIDTH, PING_PONG, Q_REGS)),
            (consumer, (descs, bufs, bars, work, 2, 3, IS_CAUSAL, Q_STAGES, O_WIDTH, PING_PONG, Q_REGS)),
            (producer, (descs, bufs, bars, counter_ptr, work, 3, IS_CAUSAL, Q_STAGES, DEFER_V)),
        ], [4, 4, 1], [160, 160, 24])  # fmt: skip
