"""What a command hands back, and how it is shown: tables for people, JSON for programs."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

_UNITS = {"": 1, "k": 10**3, "m": 10**6, "g": 10**9, "ki": 2**10, "mi": 2**20, "gi": 2**30}
_SPANS = {"s": 1, "m": 60, "h": 3600, "d": 86400, "w": 7 * 86400}


class Usage(Exception):
    """The command cannot be run as it was asked for; exit status 2."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Report:
    """`text` for people; `data`, which JSON can hold, for programs. Any of `problems` makes the exit status 1."""

    text: str
    data: dict
    problems: tuple[str, ...] = ()

    @property
    def status(self) -> int:
        return int(bool(self.problems))

    def shown(self, as_json: bool) -> str:
        if as_json:
            return json.dumps({**self.data, "problems": list(self.problems)}, indent=1)
        return self.text


def table(headers: Sequence[str], rows: Iterable[Sequence], indent: str = "") -> str:
    """Columns under `headers`; numbers are to the right of theirs."""
    rows = [list(row) for row in rows]
    numeric = [bool(rows) and all(isinstance(row[i], (int, float)) for row in rows) for i in range(len(headers))]
    cells = [list(headers), *([str(cell) for cell in row] for row in rows)]
    widths = [max(len(row[i]) for row in cells) for i in range(len(headers))]
    lines = []
    for row in cells:
        columns = zip(row, widths, numeric, strict=True)
        padded = (cell.rjust(width) if right else cell.ljust(width) for cell, width, right in columns)
        lines.append((indent + "  ".join(padded)).rstrip())
    return "\n".join(lines)


def pairs(facts: dict[str, object], indent: str = "  ") -> str:
    """A line for each fact, its name to the left."""
    width = max((len(name) for name in facts), default=0)
    return "\n".join(f"{indent}{name:{width}}  {value}".rstrip() for name, value in facts.items())


def counted(number: int, noun: str) -> str:
    """ "1 kernel", "2 kernels", "2 entries"."""
    plural = f"{noun[:-1]}ies" if noun.endswith("y") else f"{noun}s"
    return f"{number} {noun if number == 1 else plural}"


def size_text(number: float) -> str:
    """Bytes for people, in powers of 1000."""
    for unit in ("B", "kB", "MB"):
        if number < 1000:
            return f"{number:.0f} B" if unit == "B" else f"{number:.1f} {unit}"
        number /= 1000
    return f"{number:.1f} GB"


def age_text(seconds: float) -> str:
    """A span of time for people: the largest unit that fits."""
    for unit in ("d", "h", "m"):
        if seconds >= _SPANS[unit]:
            return f"{seconds / _SPANS[unit]:.0f} {unit}"
    return f"{max(0.0, seconds):.0f} s"


def parse_size(text: str) -> int:
    """Bytes of "500MB", "2GiB" or "1000". ValueError for anything else."""
    found = re.fullmatch(r"(\d+(?:\.\d+)?) *([kmg]i?)?b?", text.strip().lower())
    if not found:
        raise ValueError(f"{text!r} is no size: it takes a number and B, kB, MB, GB, KiB, MiB or GiB")
    return int(float(found[1]) * _UNITS[found[2] or ""])


def parse_age(text: str) -> float:
    """Seconds of "30d", "12h" or "90s". ValueError for anything else."""
    found = re.fullmatch(r"(\d+(?:\.\d+)?) *([smhdw])", text.strip().lower())
    if not found:
        raise ValueError(f"{text!r} is no age: it takes a number and s, m, h, d or w")
    return float(found[1]) * _SPANS[found[2]]
