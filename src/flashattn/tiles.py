"""Tile sizes and warps by (target, kernel, variant): a table without holes. Data never chooses a tile."""

from __future__ import annotations

import functools
import json
from dataclasses import dataclass, fields
from pathlib import Path

from .variants import MASKS, _Variant

KERNELS = ("attn_fwd", "hopper_attn_fwd", "bwd_preprocess", "bwd_dkdv", "bwd_dq")


@dataclass(frozen=True, slots=True)
class Tile:
    """Queries and keys a step handles, warps a program has, and depth of the software pipeline.

    max_registers: most a thread may have, so that more programs fit at once; 0: as many as the compiler likes.
    """

    block_m: int
    block_n: int
    num_warps: int
    num_stages: int
    max_registers: int = 0

    def __post_init__(self):
        for field in fields(self):
            value = getattr(self, field.name)
            if field.name == "max_registers":
                if type(value) is not int or not (value == 0 or 24 <= value <= 255):
                    raise ValueError(f"max_registers must be 0 or 24 to 255, got {value!r}")
                continue
            least = 16 if field.name.startswith("block") else 1
            power = type(value) is int and value >= least and value & (value - 1) == 0
            if not (power or (field.name == "num_stages" and type(value) is int and 1 <= value <= 8)):
                raise ValueError(
                    f"{field.name} must be a power of two from {least} on (num_stages: 1 to 8), got {value!r}"
                )


# (kernel, padded head_dim up to): tile. Large: at least 160 KiB of shared memory a block.
_LARGE = {
    "attn_fwd": {64: Tile(128, 64, 4, 3), 128: Tile(128, 64, 8, 2), 256: Tile(64, 32, 4, 2)},
    "bwd_dkdv": {64: Tile(64, 128, 8, 2), 128: Tile(64, 64, 4, 2), 256: Tile(32, 32, 4, 1)},
    "bwd_dq": {64: Tile(64, 64, 4, 2), 128: Tile(64, 64, 4, 2), 256: Tile(32, 32, 4, 1)},
}
# Measured on an H200 up to 128 (docs/performance.md); three tiles are for full, causal and window.
_HOPPER = {
    "attn_fwd": {
        64: (Tile(128, 64, 8, 3, 128), Tile(64, 64, 4, 3, 128), Tile(64, 64, 4, 2, 128)),
        128: (Tile(64, 64, 4, 3, 168), Tile(64, 64, 4, 3, 168), Tile(64, 64, 4, 2)),
        256: Tile(128, 64, 8, 2),
    },
    "bwd_dkdv": {
        64: (Tile(32, 128, 4, 2), Tile(32, 128, 4, 2), Tile(64, 64, 4, 1)),
        128: (Tile(64, 64, 4, 2), Tile(64, 64, 4, 2), Tile(32, 64, 4, 2)),
        256: Tile(32, 64, 8, 1),
    },
    "bwd_dq": {
        64: Tile(64, 64, 4, 3),
        128: (Tile(128, 64, 8, 3), Tile(128, 64, 8, 3), Tile(64, 64, 4, 2)),
        256: Tile(64, 32, 4, 1),
    },
}
_SMALL = {
    "attn_fwd": {64: Tile(64, 64, 4, 2), 128: Tile(64, 32, 4, 2), 256: Tile(32, 32, 4, 1)},
    "bwd_dkdv": {64: Tile(32, 64, 4, 1), 128: Tile(32, 32, 4, 1), 256: Tile(16, 16, 4, 1)},
    "bwd_dq": {64: Tile(64, 32, 4, 1), 128: Tile(32, 32, 4, 1), 256: Tile(16, 16, 4, 1)},
}
# Products in IEEE fp32 have no matrix instruction: small tiles, or registers run out.
_FP32 = {
    "attn_fwd": {64: Tile(32, 32, 4, 1), 128: Tile(32, 32, 4, 1), 256: Tile(16, 16, 4, 1)},
    "bwd_dkdv": {64: Tile(32, 32, 4, 1), 128: Tile(16, 16, 4, 1), 256: Tile(16, 16, 4, 1)},
    "bwd_dq": {64: Tile(32, 32, 4, 1), 128: Tile(16, 16, 4, 1), 256: Tile(16, 16, 4, 1)},
}
# Not measured. With the others' tile of the forward at 64, ptxas 12.9 gives two uniform registers now one, now another
# order, and the wheel must be the same bytes every time.
_BLACKWELL = {**_LARGE, "attn_fwd": {**_LARGE["attn_fwd"], 64: Tile(128, 64, 8, 3, 128)}}
_BY_TARGET = {
    **dict.fromkeys(("sm_80", "sm_87"), _LARGE),
    "sm_90": _HOPPER,
    **dict.fromkeys(("sm_100", "sm_103", "sm_110"), _BLACKWELL),
}


@dataclass(frozen=True, slots=True)
class HopperTile:
    """Of the Hopper forward: queries of a tile, 64 a warpgroup, and keys of a step; depth of the rings of K and V, and
    of Q; columns of O that are staged at a time (0: it leaves through Q's memory); whether warpgroups take turns at the
    tensor cores, the last V of a tile is copied behind the next tile's first K, and columns of Q kept in registers.
    """

    block_m: int
    block_n: int
    stages: int
    q_stages: int
    o_width: int
    ping_pong: bool
    defer_v: bool
    q_regs: int

    def __post_init__(self):
        accepted = {
            "block_m": (128, 192),
            "block_n": (16, 32, 64, 128, 256),
            "stages": (1, 2, 4, 8),
            # O leaves through the other tile of Q, or by a memory of its own.
            "q_stages": (1, 2) if self.o_width else (2,),
            "o_width": (0, 16, 32, 64, 128, 256),
            "ping_pong": (False, True),
            "defer_v": (False, True),
            "q_regs": (0, 16, 32, 64, 128, 256),
        }
        for name, values in accepted.items():
            value = getattr(self, name)
            if type(value) is not type(values[0]) or value not in values:
                raise ValueError(f"{name} must be {' or '.join(map(str, values))}, got {value!r}")


# (head_dim, head_dim_v): (full, causal), measured on an H200 (docs/performance.md).
_HOPPER_FWD = {
    (64, 64): (HopperTile(192, 128, 4, 2, 0, True, True, 0), HopperTile(192, 128, 4, 2, 0, True, True, 0)),
    (96, 96): (HopperTile(128, 128, 2, 2, 0, True, False, 0), HopperTile(128, 128, 2, 2, 0, True, False, 0)),
    (128, 128): (HopperTile(128, 128, 2, 2, 0, True, False, 64), HopperTile(128, 128, 2, 2, 0, True, False, 128)),
    (192, 192): (HopperTile(128, 64, 2, 2, 0, True, False, 64), HopperTile(128, 64, 2, 2, 0, True, False, 64)),
    (256, 256): (HopperTile(128, 64, 2, 1, 128, True, False, 64), HopperTile(128, 64, 2, 1, 128, True, False, 0)),
    (192, 128): (HopperTile(128, 128, 2, 1, 64, True, False, 0), HopperTile(128, 128, 2, 1, 64, True, False, 0)),
}
_PREPROCESS = Tile(32, 16, 4, 1)


def tile_for(kernel: str, variant: _Variant, target: str, override: Path | None = None) -> Tile | HopperTile:
    """The tile of `kernel` for `variant` on `target`. `override` is the file that FLASHATTN_TILES names."""
    if override is not None:
        chosen = read_override(override).get(kernel)
        if chosen is not None:
            return chosen
    if kernel == "bwd_preprocess":
        return _PREPROCESS
    if kernel == "hopper_attn_fwd":
        return _HOPPER_FWD[variant.head_dim, variant.head_dim_v][variant.mask == "causal"]
    table = _FP32 if variant.dtype == "fp32" else _BY_TARGET.get(target, _SMALL)
    width = max(64, variant.block_d, variant.block_dv)
    found = table[kernel][width]
    return found if isinstance(found, Tile) else found[MASKS.index(variant.mask)]


@functools.cache
def read_override(path: Path) -> dict[str, Tile | HopperTile]:
    """{kernel: {"block_m": ..., "block_n": ..., "num_warps": ..., "num_stages": ...}}. Else ValueError."""
    try:
        data = json.loads(Path(path).read_text())
        unknown = sorted(set(data) - set(KERNELS))
        if unknown:
            raise ValueError(f"unknown kernel {unknown[0]!r}, expected {', '.join(KERNELS)}")
        kinds = {"hopper_attn_fwd": HopperTile}
        return {kernel: kinds.get(kernel, Tile)(**tile) for kernel, tile in data.items()}
    except (OSError, TypeError, ValueError, AttributeError) as error:
        raise ValueError(f"FLASHATTN_TILES={path}: {error}") from None
