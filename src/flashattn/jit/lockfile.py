"""The lock file of a wheel: a line of text for each kernel, so that a change shows what it does to the machine code."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from .artifact import Artifact

_HEADER = "# target, spec, sha256 of the machine code, its bytes, kernel"


@dataclass(frozen=True)
class Row:
    target: str
    spec_key: str
    code_sha256: str
    code_bytes: int
    label: str


@dataclass(frozen=True)
class Lock:
    """What was compiled (`rows` by spec key), from which sources of the kernels, for which profile, by which Triton."""

    profile: str
    source_digest: str
    triton: str
    rows: dict[str, Row]


def write(path: Path, profile: str, source_digest: str, triton: str, artifacts: Iterable[Artifact]) -> None:
    rows = sorted(
        f"{made.meta['target']} {made.spec_key} {made.meta['code_sha256']} {len(made.code)} {made.label}"
        for made in artifacts
    )
    path.write_text("\n".join([_HEADER, f"# {profile} {source_digest} {triton}", *rows, ""]))


def read(path: Path) -> Lock:
    """Raises FileNotFoundError, or ValueError for a file that `write` did not write."""
    _, head, *lines = path.read_text().splitlines()
    mark, profile, digest, triton = head.split()
    if mark != "#":
        raise ValueError(f"{path}: line 2 is not what a lock file has there: {head!r}")
    rows = {}
    for line in lines:
        target, key, sha256, size, label = line.split(maxsplit=4)
        rows[key] = Row(target, key, sha256, int(size), label)
    return Lock(profile, digest, triton, rows)
