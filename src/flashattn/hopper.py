"""The host's side of the Hopper forward: tensor maps, tile counters, and the grid."""

from __future__ import annotations

import functools

import torch

from . import hopper_boxes
from .jit import driver, tensormap

_L2_BYTES = 32 << 20  # of keys and values that neighbouring tiles may share
_MOST_SECTIONS = 64
_MOST_MAPS = 64
_counters: dict[tuple[int, int], torch.Tensor] = {}


@functools.cache
def multiprocessors(index: int) -> int:
    return torch.cuda.get_device_properties(index).multi_processor_count


def counter(index: int) -> int:
    """The address of a zero that the kernel counts tiles with, and leaves as a zero.

    Launches on one stream follow each other, so they share one. A CUDA graph may be replayed beside anything: each of
    its launches has a counter of its own, which the graph itself sets to zero.
    """
    stream = torch._C._cuda_getCurrentRawStream(index)
    captured = torch.cuda.is_current_stream_capturing()
    found = None if captured else _counters.get((index, stream))
    if found is None:
        found = torch.empty(1, dtype=torch.int32, device=f"cuda:{index}")
        # torch.zeros would load a kernel first, which takes longer than the attention.
        driver.cuda_device(index).zero(found.data_ptr(), 1, stream)
        if not captured:
            _counters[index, stream] = found
    return found.data_ptr()


class _Maps:
    """address -> the kernel's arguments for a tensor of one shape: a map, extents and strides for each tile's kind."""

    def __init__(self, tensor, dtype: str, tiles: tuple, index: int):
        self.about = (tuple(tensor.shape), tensor.stride())
        self.dtype, self.index = dtype, index
        self.boxes = [hopper_boxes.box_of(rows, columns) for rows, columns in tiles]
        self.made: dict[int, tuple] = {}

    def __call__(self, address: int) -> tuple:
        found = self.made.get(address)
        if found is None:
            if len(self.made) >= _MOST_MAPS:
                self.made.clear()
            shape, strides = self.about
            found = ()
            for box, swizzle in self.boxes:
                made = tensormap.encode(address, shape, strides, self.dtype, box, swizzle, self.index)
                found += (made, *shape, *strides)
            self.made[address] = found
        return found


def section(seqlen_k: int, bytes_of_row: float, is_causal: bool) -> int:
    """How many query heads' tiles come before those of any other: as many as have their keys and values in the L2.

    Without a mask one after the other is as good: all tiles are equally long.
    """
    heads = 1
    while is_causal and heads < _MOST_SECTIONS and 2 * heads * seqlen_k * bytes_of_row <= _L2_BYTES:
        heads *= 2
    return heads


def prepare(
    constants: dict, index: int, tensors: tuple, dtype: str, diagonal: int, scale: float, write_lse: bool
) -> tuple:
    """(grid, addresses of q, k, v, out, lse -> the kernel's arguments) for calls with tensors like these."""
    q, k, _, _ = tensors
    batch, seqlen_q, heads_q, _ = q.shape
    _, seqlen_k, heads_k, _ = k.shape
    head_dim, head_dim_v = constants["HEAD_DIM"], constants["HEAD_DIM_V"]
    tiles = hopper_boxes.tiles_of(head_dim, head_dim_v, constants["BLOCK_N"], constants["O_WIDTH"])
    of_q, of_k, of_v, of_out = (
        _Maps(tensor, dtype, kinds, index) for tensor, kinds in zip(tensors, tiles.values(), strict=True)
    )
    together = section(seqlen_k, 2 * (head_dim + head_dim_v) * heads_k / heads_q, constants["IS_CAUSAL"])
    scalars = (batch, heads_q, heads_k, seqlen_q, seqlen_k, diagonal, scale, int(write_lse), together)

    def arguments(q_ptr: int, k_ptr: int, v_ptr: int, out_ptr: int, lse_ptr: int) -> tuple:
        maps = (*of_q(q_ptr), *of_k(k_ptr), *of_v(v_ptr), *of_out(out_ptr))
        return (*maps, lse_ptr, counter(index), *scalars)

    return min(multiprocessors(index), batch * heads_q * -(-seqlen_q // constants["BLOCK_M"])), arguments
