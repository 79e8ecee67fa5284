"""Tiles: a table without holes, and a file in its place that is checked when it is read."""

from __future__ import annotations

import json
from dataclasses import asdict

import pytest

from flashattn import declared
from flashattn.jit.targets import SUPPORTED
from flashattn.specs import kernels_of
from flashattn.tiles import HopperTile, Tile, read_override, tile_for

TILE = {"block_m": 64, "block_n": 32, "num_warps": 4, "num_stages": 2}
HOPPER = asdict(HopperTile(128, 128, 2, 2, 0, True, False, 64))


def written(folder, data):
    path = folder / "tiles.json"
    path.write_text(json.dumps(data))
    return path


@pytest.mark.parametrize("target", SUPPORTED)
def test_every_declared_kernel_has_a_tile(target):
    for profile in declared.PROFILES:
        for variant in declared.declared(profile, target):
            for kernel in kernels_of(variant, target):
                assert isinstance(tile_for(kernel, variant, target), HopperTile if "hopper" in kernel else Tile)


def test_a_file_stands_in_for_the_table(tmp_path):
    path = written(tmp_path, {"attn_fwd": TILE, "hopper_attn_fwd": HOPPER})
    assert read_override(path) == {"attn_fwd": Tile(**TILE), "hopper_attn_fwd": HopperTile(**HOPPER)}


@pytest.mark.parametrize(
    ("kernel", "change", "text"),
    [
        ("attn_fwd", {"block_m": 48}, "block_m must be a power of two from 16 on .*got 48"),
        ("attn_fwd", {"num_stages": 9}, "num_stages must be .*got 9"),
        ("attn_fwd", {"max_registers": 300}, "max_registers must be 0 or 24 to 255, got 300"),
        ("attn_fwd", {"warps": 4}, "warps"),
        ("hopper_attn_fwd", {"block_m": 64}, "block_m must be 128 or 192, got 64"),
        ("hopper_attn_fwd", {"stages": 3}, "stages must be 1 or 2 or 4 or 8, got 3"),
        ("hopper_attn_fwd", {"q_stages": 1}, "q_stages must be 2, got 1"),
        ("hopper_attn_fwd", {"ping_pong": 1}, "ping_pong must be False or True, got 1"),
        ("hopper_attn_fwd", {"q_regs": 65}, "q_regs must be 0 or 16 .*got 65"),
        ("bwd_dk", {}, "unknown kernel 'bwd_dk', expected attn_fwd, hopper_attn_fwd"),
    ],
)
def test_a_wrong_tile_is_named_with_what_is_accepted(tmp_path, kernel, change, text):
    right = HOPPER if kernel.startswith("hopper") else TILE
    with pytest.raises(ValueError, match=f"FLASHATTN_TILES=.*{text}"):
        read_override(written(tmp_path, {kernel: {**right, **change}}))
