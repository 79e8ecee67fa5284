"""The GPUs that code is compiled for, and what each allows a kernel to use."""

from __future__ import annotations

import re
from dataclasses import dataclass

KIB = 1024


@dataclass(frozen=True, slots=True)
class Target:
    """One GPU architecture. `shared_limit` is in bytes for one block; Triton does not check it when it compiles."""

    name: str
    backend: str
    arch: int | str
    warp_size: int
    shared_limit: int


def _cuda(capability: int, shared_kib: int) -> Target:
    return Target(f"sm_{capability}", "cuda", capability, 32, shared_kib * KIB)


def _hip(arch: str, shared_kib: int) -> Target:
    return Target(arch, "hip", arch, 64, shared_kib * KIB)


_KNOWN = {
    target.name: target
    for target in (
        _cuda(80, 163),
        _cuda(86, 99),
        _cuda(87, 163),
        _cuda(89, 99),
        _cuda(90, 227),
        _cuda(100, 227),
        _cuda(103, 227),
        _cuda(110, 227),
        _cuda(120, 99),
        _cuda(121, 99),
        _hip("gfx90a", 64),
        _hip("gfx942", 64),
        _hip("gfx950", 160),
    )
}

SUPPORTED = ("sm_80", "sm_86", "sm_89", "sm_90", "sm_100", "sm_120", "gfx942", "gfx950")
"""Targets that a wheel can hold. The others that `target_of` knows are compiled on first call only."""


def target_of(name: str) -> Target:
    """The target called `name`, such as "sm_90" or "gfx942". Raises ValueError for one that no kernel runs on."""
    target = _KNOWN.get(name)
    if target is None:
        raise ValueError(
            f"target {name!r} is not supported: a wheel can hold {', '.join(SUPPORTED)}; "
            f"{', '.join(sorted(set(_KNOWN) - set(SUPPORTED)))} are compiled on first call"
        )
    return target


def parse_targets(text: str) -> tuple[str, ...]:
    """A comma-separated list of targets a wheel can hold, in the order of `SUPPORTED`, without repeats."""
    names = [name for name in re.split(r"[,\s]+", text.strip()) if name]
    unknown = [name for name in names if name not in SUPPORTED]
    if unknown or not names:
        found = ", ".join(unknown) if unknown else "an empty list"
        raise ValueError(f"targets: {found} is not among the supported {', '.join(SUPPORTED)}")
    return tuple(name for name in SUPPORTED if name in names)
