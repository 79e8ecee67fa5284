"""A file that gets a line of JSON for each kernel asked for, so that all of them can be compiled beforehand."""

from __future__ import annotations

import json
import os
from pathlib import Path

from .spec import KernelSpec, canonical_json


def append(path: Path, spec: KernelSpec) -> None:
    """Add a line for `spec`. It is one write, so processes can share the file."""
    line = canonical_json({"spec_key": spec.key, "label": spec.label(), "spec": spec.to_json()}) + b"\n"
    fd = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o666)
    try:
        os.write(fd, line)
    finally:
        os.close(fd)


def read(path: Path) -> list[KernelSpec]:
    """The specs in `path`, each once, in order. ValueError names the line that is none."""
    found = {}
    for number, line in enumerate(Path(path).read_bytes().splitlines(), 1):
        try:
            spec = KernelSpec.from_json(json.loads(line)["spec"])
        except Exception as error:
            raise ValueError(f"{path} line {number} does not hold a kernel's spec ({type(error).__name__})") from None
        found.setdefault(spec.key, spec)
    return list(found.values())
