"""The producer warp of the Hopper forward: it asks for tiles, and copies Q, K and V to shared memory."""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier

from .hopper_common import (
    ask_tile,
    copy_in,
    got_tile,
    publish_tile,
    slot_of,
    tile_at,
    visible_blocks,
)


@gluon.jit
def load(descs, bufs, full, empty, at, parity, off_b, row, off_h):
    """Copy rows from `row` on, all parts of head_dim, to slot `at` of a ring once that is empty."""
    mbarrier.wait(empty.index(at), parity)
    if len(descs) == 1:
        mbarrier.expect(full.index(at), descs[0].block_type.nbytes)
    else:
        mbarrier.expect(full.index(at), descs[0].block_type.nbytes + descs[1].block_type.nbytes)
    for i in gl.static_range(len(descs)):
        copy_in(descs[i], [off_b, row, off_h, i * descs[0].block_type.shape[3]], full.index(at), bufs[i].index(at))


@gluon.jit
def load_queries(descs, bufs, bars, turn, off_b, row, off_h, WARPGROUPS: gl.constexpr, Q_STAGES: gl.constexpr):
    """Copy 64 queries for each warpgroup."""
    at, phase = slot_of(turn, Q_STAGES)
    parity = phase ^ 1
    if Q_STAGES == 2:
        # A tile gives back the other slot, so the first to do so, for slot 1, is the tile before its first.
        parity = parity ^ at
    for g in gl.static_range(WARPGROUPS):
        load(descs.q, bufs.q, bars.q_full, bars.q_empty, at * WARPGROUPS + g, parity, off_b, row + g * 64, off_h)


@gluon.jit
def load_keys(descs, bufs, bars, count, off_b, row, off_hk):
    at, phase = slot_of(count, bufs.k[0].shape[0])
    load(descs.k, bufs.k, bars.k_full, bars.k_empty, at, phase ^ 1, off_b, row, off_hk)


@gluon.jit
def load_values(descs, bufs, bars, count, off_b, row, off_hk):
    at, phase = slot_of(count, bufs.v[0].shape[0])
    load(descs.v, bufs.v, bars.v_full, bars.v_empty, at, phase ^ 1, off_b, row, off_hk)


@gluon.jit
def producer(
    descs, bufs, bars, counter_ptr, work, WARPGROUPS: gl.constexpr, IS_CAUSAL: gl.constexpr, Q_STAGES: gl.constexpr,
    DEFER_V: gl.constexpr,
):  # fmt: skip
    """The warp that copies: K by blocks, V one behind; with DEFER_V a tile's last V follows the next one's first K."""
    BLOCK_N: gl.constexpr = bufs.k[0].shape[2]
    count = 0
    turn = 0
    last_b = 0
    last_h = 0
    tile = gl.program_id(0)
    while tile < work.total:
        start_m, off_bh = tile_at(tile, work, IS_CAUSAL)
        off_b = off_bh // work.heads_q
        off_h = off_bh - off_b * work.heads_q
        off_hk = off_h // work.group
        row = start_m * (64 * WARPGROUPS)
        blocks = visible_blocks(row + 64 * WARPGROUPS, work, BLOCK_N, IS_CAUSAL)
        # Late, for who asks early takes a tile that another program could have begun sooner.
        ask_at = gl.maximum(blocks - 3, 0)
        answer = gl.zeros([32], gl.int32, gl.BlockedLayout([1], [32], [1], [0]))
        if not DEFER_V:
            load_queries(descs, bufs, bars, turn, off_b, row, off_h, WARPGROUPS, Q_STAGES)
        for i in range(blocks):
            load_keys(descs, bufs, bars, count, off_b, (blocks - 1 - i) * BLOCK_N, off_hk)
            if i > 0:
                load_values(descs, bufs, bars, count - 1, off_b, (blocks - i) * BLOCK_N, off_hk)
            elif DEFER_V:
                if turn > 0:
                    load_values(descs, bufs, bars, count - 1, last_b, 0, last_h)
                load_queries(descs, bufs, bars, turn, off_b, row, off_h, WARPGROUPS, Q_STAGES)
            if i == ask_at:
                answer = ask_tile(counter_ptr)
            count += 1
        if not DEFER_V:
            load_values(descs, bufs, bars, count - 1, off_b, 0, off_hk)
        last_b = off_b
        last_h = off_hk
        tile = got_tile(answer, counter_ptr, work)
        publish_tile(tile, bufs, bars, turn)
        turn += 1
    if DEFER_V:
        if turn > 0:
            load_values(descs, bufs, bars, count - 1, last_b, 0, last_h)
