"""Decision: where a kernel came from, and why not from elsewhere."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

WHEEL = "wheel"
CACHE = "user cache"
COMPILED = "compiled"
MISSING = "missing"


class Rejected(NamedTuple):
    """A source that did not give the kernel. `reason` is a code of `REASONS`, `text` the facts in words."""

    source: str
    reason: str
    text: str


REASONS = {
    "not declared": "the list of kernels to compile ahead of time does not have it",
    "not built": "this wheel was built without it, or without its GPU",
    "absent": "it is not in the cache",
    "arch": "it is for another GPU",
    "source": "it was compiled from other sources of the kernels",
    "environment taint": "a variable that changes machine code is, or was, set",
    "schema": "it has a format of another version",
    "corrupt": "its bytes are damaged",
    "unreadable": "it cannot be read",
    "forced": "FLASHATTN_FORCE_JIT asks for a new compile",
    "disabled": "compiling is off",
    "frozen": "freeze() was called",
}


@dataclass(frozen=True, slots=True)
class Decision:
    """How one spec was resolved. `source` is "wheel", "user cache", "compiled", or "missing" where nothing was found.

    seconds: all that resolving took. note: what else is worth knowing, or "".
    """

    source: str
    spec_key: str
    artifact_key: str
    rejected: tuple[Rejected, ...]
    seconds: float
    label: str = ""
    note: str = ""

    def describe(self) -> str:
        """For people: a line for the kernel, then one for each source that was passed over."""
        where = {WHEEL: "from the wheel", CACHE: "from the user's cache", COMPILED: "compiled here"}
        head = f"{self.label}: {where.get(self.source, 'not found')}, {self.seconds:.3f} s"
        lines = [f"  {source}: {reason}: {text}" for source, reason, text in self.rejected]
        return "\n".join([head, *lines, *([f"  note: {self.note}"] if self.note else [])])


class KernelMissing(RuntimeError):
    """There is no compiled kernel and compiling is not allowed, or not possible."""

    def __init__(self, text: str, spec_key: str = "", rejected: tuple[Rejected, ...] = ()):
        super().__init__(text)
        self.spec_key = spec_key
        self.rejected = rejected


_REMEDY = {
    "FLASHATTN_DISABLE_JIT": "unset FLASHATTN_DISABLE_JIT",
    "FLASHATTN_ON_AOT_MISS": "set FLASHATTN_ON_AOT_MISS=warn",
    "freeze": "call it once before freeze()",
}


def missing(label: str, spec_key: str, rejected: tuple[Rejected, ...]) -> KernelMissing:
    """The error for a kernel that no source gave; the last of `rejected` says why it is not compiled."""
    *sources, last = rejected
    found = "; ".join(f"{source}: {reason}, {text}" for source, reason, text in sources)
    remedy = next((text for name, text in _REMEDY.items() if name in last.text), "install the sources of flashattn")
    return KernelMissing(
        f"{label} is in no source of compiled kernels ({found}) and is not compiled, since {last.text}: {remedy}, or "
        "compile it beforehand with `flashattn warmup`, or install a wheel that holds it",
        spec_key,
        rejected,
    )
