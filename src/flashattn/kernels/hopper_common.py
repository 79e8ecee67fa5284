"""What Hopper's kernels share: rings of buffers, turns at the tensor cores, the order of tiles, Triton's new names."""

from typing import NamedTuple

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier, tma

# Triton 3.8 renamed them; 3.9 keeps the old names for an error.
copy_in = tma.async_load if hasattr(tma, "async_load") else tma.async_copy_global_to_shared
copy_out = tma.async_store if hasattr(tma, "async_store") else tma.async_copy_shared_to_global


class Work(NamedTuple):
    """What a launch computes, and how its tiles are numbered."""

    lse_ptr: gl.tensor
    write_lse: gl.tensor
    softmax_scale: gl.tensor
    heads_q: gl.tensor
    group: gl.tensor
    seqlen_q: gl.tensor
    seqlen_k: gl.tensor
    diagonal: gl.tensor
    tiles_m: gl.tensor
    rows: gl.tensor
    section: gl.tensor
    total: gl.tensor


class Buffers(NamedTuple):
    """Shared memory: q, k, v are tuples over the parts of head_dim, each a ring of tiles."""

    q: gl.tuple
    k: gl.tuple
    v: gl.tuple
    o: gl.tuple
    tile: gl.shared_memory_descriptor


class Descriptors(NamedTuple):
    """Tensor maps, a tuple over the parts of head_dim for each tensor."""

    q: gl.tuple
    k: gl.tuple
    v: gl.tuple
    out: gl.tuple


class Barriers(NamedTuple):
    """A full and an empty barrier for every slot of every ring."""

    q_full: gl.shared_memory_descriptor
    q_empty: gl.shared_memory_descriptor
    k_full: gl.shared_memory_descriptor
    k_empty: gl.shared_memory_descriptor
    v_full: gl.shared_memory_descriptor
    v_empty: gl.shared_memory_descriptor
    tile_full: gl.shared_memory_descriptor
    tile_empty: gl.shared_memory_descriptor


@gluon.constexpr_function
def log2_of(slots):
    if slots & (slots - 1):
        raise ValueError(f"a ring has 1, 2, 4 ... slots, not {slots}")
    return slots.bit_length() - 1


@gluon.jit
def slot_of(count, SLOTS: gl.constexpr):
    """Where the count-th tile lies in a ring, and the phase of its barriers."""
    SHIFT: gl.constexpr = log2_of(SLOTS)
    return count & (SLOTS - 1), (count >> SHIFT) & 1


@gluon.constexpr_function
def turn_barrier(warpgroup, warpgroups):
    # Triton uses the hardware's barriers 0 to 6.
    return 7 + warpgroup % warpgroups


@gluon.jit
def take_turn(WARPGROUP: gl.constexpr, WARPGROUPS: gl.constexpr):
    """Wait until the warpgroup before has given the tensor cores away."""
    ID: gl.constexpr = turn_barrier(WARPGROUP, WARPGROUPS)
    gl.inline_asm_elementwise(f"bar.sync {ID}, 256; mov.u32 $0, 0;", "=r", [], dtype=gl.int32, is_pure=False, pack=1)


@gluon.jit
def pass_turn(WARPGROUP: gl.constexpr, WARPGROUPS: gl.constexpr):
    """Give the tensor cores to the next warpgroup."""
    ID: gl.constexpr = turn_barrier(WARPGROUP + 1, WARPGROUPS)
    gl.inline_asm_elementwise(f"bar.arrive {ID}, 256; mov.u32 $0, 0;", "=r", [], dtype=gl.int32, is_pure=False, pack=1)


@gluon.jit
def row_sums(p):
    """Sums over what one thread holds of each row: [M, N] -> [M, 4]. Needs no other thread; the rest is done once."""
    return gl.sum(gl.sum(p.reshape([p.shape[0], p.shape[1] // 8, 4, 2]), 3), 1)


@gluon.jit
def parts(tiles, FIRST: gl.constexpr):
    """A tuple of tiles [N, D], the first cut into FIRST columns and what doubles from there; as it is if FIRST is 0."""
    if FIRST == 0:
        return tiles
    else:
        D: gl.constexpr = tiles[0].shape[1]
        out = (tiles[0].slice(0, FIRST, dim=1),)
        for i in gl.static_range(8):
            if FIRST * 2**i < D:
                out = out + (tiles[0].slice(FIRST * 2**i, FIRST * 2**i, dim=1),)
        return out + tiles[1 : len(tiles)]


@gluon.jit
def tile_at(tile, work, IS_CAUSAL: gl.constexpr):
    """Tile number -> (block of rows, batch * heads_q + head).

    Sections of heads whose keys and values fit in the L2 cache together; inside one, heads run fastest, and the tiles
    with the most keys come first.
    """
    per_section = work.section * work.tiles_m
    section = tile // per_section
    rest = tile - section * per_section
    heads = gl.minimum(work.section, work.rows - section * work.section)
    block = rest // heads
    off_bh = section * work.section + (rest - block * heads)
    if IS_CAUSAL:
        block = work.tiles_m - 1 - block
    return block, off_bh


@gluon.jit
def visible_blocks(row_end, work, BLOCK_N: gl.constexpr, IS_CAUSAL: gl.constexpr):
    """How many blocks of keys the queries before row_end see; at least one is always walked over."""
    stop = work.seqlen_k
    if IS_CAUSAL:
        stop = gl.minimum(row_end + work.diagonal, stop)
    return gl.cdiv(gl.maximum(stop, 1), BLOCK_N)


@gluon.jit
def ask_tile(counter_ptr):
    """Ask for a tile. The answer is first looked at in `got_tile`: nobody waits for it here."""
    lane = gl.arange(0, 32, gl.BlockedLayout([1], [32], [1], [0]))
    return gl.atomic_add(counter_ptr + lane * 0, lane * 0 + 1, mask=lane == 0, sem="relaxed")


@gluon.jit
def got_tile(answer, counter_ptr, work):
    """The tile that was asked for. There are exactly `total` asks in a launch; the last one resets the counter."""
    lane = gl.arange(0, 32, gl.BlockedLayout([1], [32], [1], [0]))
    ticket = gl.max(gl.where(lane == 0, answer, lane * 0), 0)
    if ticket == work.total - 1:
        gl.store(counter_ptr, 0)
    return ticket + gl.num_programs(0)


@gluon.jit
def publish_tile(tile, bufs, bars, count):
    """Tell the consumers which tile comes next."""
    at, phase = slot_of(count, 2)
    mbarrier.wait(bars.tile_empty.index(at), phase ^ 1)
    bufs.tile.index(at).store(gl.full([1], tile, gl.int32, gl.BlockedLayout([1], [32], [1], [0])))
    mbarrier.arrive(bars.tile_full.index(at), count=1)


@gluon.jit
def taken_tile(bufs, bars, count):
    """The tile that the producer published."""
    at, phase = slot_of(count, 2)
    mbarrier.wait(bars.tile_full.index(at), phase)
    # One number, for whose parts the consumers divide: two numbers from shared memory are not proved to be the same
    # in all threads, and cost a move to a uniform register before every product of the hot loop.
    tile = gl.max(bufs.tile.index(at).load(gl.BlockedLayout([1], [32], [4], [0])), 0)
    mbarrier.arrive(bars.tile_empty.index(at), count=1)
    return tile
