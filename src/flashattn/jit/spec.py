"""KernelSpec: everything a binary depends on, as data."""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass, fields
from functools import cached_property
from pathlib import Path


def canonical_json(value) -> bytes:
    """One spelling of a JSON value: the form that is hashed."""
    return json.dumps(value, sort_keys=True, separators=(",", ":"), ensure_ascii=True, allow_nan=False).encode()


def sha256(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


def _freeze(value):
    return tuple(_freeze(item) for item in value) if isinstance(value, (list, tuple)) else value


@dataclass(frozen=True, kw_only=True)
class KernelSpec:
    """What to compile, for which GPU, and how.

    module, kernel: where the kernel function lives and its name, which is also the symbol in the binary.
    signature: (name, type) in the order of the parameters. A type is "*bf16", "fp32", "i32", "i64", "constexpr",
        or a tuple of those for a parameter that is a tuple.
    constants: (NAME, value) of each constexpr, bool or int.
    alignment: (path, divisor): a promise that a pointer (bytes) or an integer is a multiple. "q_strides.1" is
        element 1 of a tuple.
    options: (name, value) given to the compiler.
    target: "sm_90", "gfx942", ...
    """

    module: str
    kernel: str
    signature: tuple
    constants: tuple
    alignment: tuple
    options: tuple
    target: str

    def to_json(self) -> dict:
        return {field.name: getattr(self, field.name) for field in fields(self)}

    @classmethod
    def from_json(cls, data: dict) -> KernelSpec:
        return cls(**{name: _freeze(value) for name, value in data.items()})

    @cached_property
    def key(self) -> str:
        """sha256 of the canonical JSON: what a wheel is searched for."""
        return sha256(canonical_json(self.to_json()))

    def label(self) -> str:
        """The spec in a line for people."""
        dtype = next(filter(None, (_dtype(kind) for _, kind in self.signature)), "")
        shown = " ".join(f"{name}={int(value)}" for name, value in self.constants)
        aligned = "aligned" if self.alignment else "generic"
        return f"{self.kernel}[{self.target} {dtype} {aligned} {shown}]"


def _dtype(kind) -> str:
    """Of what a parameter points to or describes: "bf16"; "" for a number."""
    if isinstance(kind, tuple):
        return _dtype(kind[0]) if kind else ""
    if kind.startswith("tensordesc<"):
        return kind[len("tensordesc<") : kind.index("[")]
    return kind[1:] if kind.startswith("*") else ""


def source_digest(folder: Path) -> str | None:
    """sha256 over the sorted sha256 of every Python file below `folder`; None where the sources cannot be read.

    Contents only: names, places and times of files do not count.
    """
    try:
        files = [path for path in Path(folder).rglob("*.py") if "__pycache__" not in path.parts]
        digests = sorted(sha256(path.read_bytes()) for path in files)
    except OSError:
        return None
    return sha256("\n".join(digests).encode()) if digests else None
