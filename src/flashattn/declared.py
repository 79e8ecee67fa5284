"""The variants that a wheel holds: read by build_aot.py and, to say what is missing, when a kernel is resolved."""

from __future__ import annotations

from itertools import product

from .variants import MASKS, BwdVariant, FwdVariant

PROFILES = ("core", "full")
_DTYPES = ("bf16", "fp16")
_HEAD_DIMS = (64, 96, 128, 192, 256)


def axes(profile: str) -> list[tuple[str, tuple, str]]:
    """(field, values, reason) of each axis whose product is the declared list."""
    _check(profile)
    dims = _HEAD_DIMS if profile == "core" else (16, 32, 40, 48, 64, 72, 80, 96, 104, 112, 128, 160, 192, 224, 256)
    return [
        ("dtype", _DTYPES, "what transformers are trained and served in"),
        ("head_dim", dims, "sizes of common models; others are compiled on first call"),
        ("mask", MASKS, "the loops over keys differ; how far a window reaches is run-time data"),
        ("is_aligned", (True,), "16-byte loads; views that are not aligned are compiled on first call"),
    ]


def declared(profile: str, target: str) -> list[FwdVariant | BwdVariant]:
    """Every variant of `profile`; the same for each target."""
    names, values, _ = zip(*axes(profile), strict=True)
    found = []
    for combination in product(*values):
        facts = dict(zip(names, combination, strict=True))
        facts.update(head_dim_v=facts["head_dim"], allow_tf32=False)
        found += [*(FwdVariant(**facts, has_tables=tables) for tables in (False, True)), BwdVariant(**facts)]
    return found


def _check(profile: str) -> None:
    if profile not in PROFILES:
        raise ValueError(f"profile must be one of {', '.join(PROFILES)}, got {profile!r}")
