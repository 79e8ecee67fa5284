"""Tiles to try for a kernel, and how to choose among measured ones. Needs no GPU."""

from __future__ import annotations

import argparse
import itertools
import math
from dataclasses import dataclass, replace
from typing import NamedTuple

KERNELS = ("attn_fwd", "bwd_dkdv", "bwd_dq")


class Tile(NamedTuple):
    """What a candidate changes in a spec."""

    block_m: int
    block_n: int
    num_warps: int
    num_stages: int
    max_registers: int = 0

    def __str__(self) -> str:
        most = f" r{self.max_registers}" if self.max_registers else ""
        return f"{self.block_m}x{self.block_n} w{self.num_warps} s{self.num_stages}{most}"


def parse_tile(text: str) -> Tile:
    blocks, warps, stages, *most = text.split()
    return Tile(*map(int, blocks.split("x")), int(warps[1:]), int(stages[1:]), *(int(each[1:]) for each in most))


def tile_argument(text: str) -> Tile:
    try:
        return parse_tile(text.replace("w", " w").replace("s", " s").replace("r", " r"))
    except (ValueError, TypeError):
        raise argparse.ArgumentTypeError(f"{text!r} is not like 128x64w4s3 or 128x64w8s3r128") from None


@dataclass(frozen=True, slots=True, kw_only=True)
class Group:
    """The kernels that one tile is chosen for."""

    kernel: str
    dtype: str
    head_dim: int
    mask: str

    def __str__(self) -> str:
        return f"{self.kernel} {self.dtype} d{self.head_dim} {self.mask}"


def _width(head_dim: int) -> int:
    """Columns of a tile of inputs."""
    return 1 << max(4, (head_dim - 1).bit_length())


def accumulators(kernel: str, head_dim: int, tile: Tile) -> float:
    """32-bit registers a thread needs for what stays in registers: the sums, and the tiles of scores."""
    m, n = tile.block_m, tile.block_n
    width = _width(head_dim)
    elements = {"attn_fwd": m * width + m * n, "bwd_dkdv": 2 * n * width + 2 * m * n, "bwd_dq": m * width + 2 * m * n}
    return elements[kernel] / (32 * tile.num_warps)


def shared_bytes(kernel: str, head_dim: int, tile: Tile) -> int:
    """A lower bound of what 16-bit tiles need: the owned ones once, the streamed ones for each stage."""
    owned, streamed = (tile.block_n, tile.block_m) if kernel == "bwd_dkdv" else (tile.block_m, tile.block_n)
    held = 1 if kernel == "attn_fwd" else 2
    return 2 * _width(head_dim) * (held * owned + 2 * streamed * max(1, tile.num_stages - 1))


def candidates(kernel: str, head_dim: int, shared_limit: int) -> list[Tile]:
    """Tiles worth compiling: within registers and shared memory by a rough count, and not far below either."""
    by_keys = kernel == "bwd_dkdv"
    stages = (2, 3, 4) if kernel == "attn_fwd" else (1, 2, 3)
    found = []
    for owned, streamed, num_warps, num_stages in itertools.product((32, 64, 128), (16, 32, 64, 128), (4, 8), stages):
        block_m, block_n = (streamed, owned) if by_keys else (owned, streamed)
        tile = Tile(block_m, block_n, num_warps, num_stages)
        # Small tiles are for head dims that leave room for nothing else.
        if min(owned, 2 * streamed) < 64 and _width(head_dim) < 256:
            continue
        fits = shared_bytes(kernel, head_dim, tile) <= shared_limit
        if fits and 64 <= accumulators(kernel, head_dim, tile) <= 256:
            found.append(tile)
    return found


def tile_of(spec) -> Tile:
    """The tile a spec was made with."""
    constants, options = dict(spec.constants), dict(spec.options)
    most = options.get("maxnreg", 0)
    return Tile(constants["BLOCK_M"], constants["BLOCK_N"], options["num_warps"], options["num_stages"], most)


def with_tile(spec, tile: Tile):
    """The spec with another tile. Raises KeyError if it has none."""
    tile_of(spec)
    blocks, compiler = {"BLOCK_M": tile.block_m, "BLOCK_N": tile.block_n}, tile._asdict()
    return replace(
        spec,
        constants=tuple((name, blocks.get(name, value)) for name, value in spec.constants),
        options=(
            *((name, compiler.get(name, value)) for name, value in spec.options if name != "maxnreg"),
            *((("maxnreg", tile.max_registers),) if tile.max_registers else ()),
        ),
    )


def best_first(times: dict[int, dict[str, float]]) -> list[tuple[str, float]]:
    """(name, slowdown), best first. times: seqlen -> name -> ms; a name must have a time at every seqlen.

    The slowdown is the geometric mean over sequence lengths of a time over that length's best.
    """
    everywhere = set.intersection(*(set(row) for row in times.values()))
    means = {}
    for name in everywhere:
        ratios = [row[name] / min(row.values()) for row in times.values()]
        means[name] = math.exp(sum(map(math.log, ratios)) / len(ratios))
    return sorted(means.items(), key=lambda item: item[1])
