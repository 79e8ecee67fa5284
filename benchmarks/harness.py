"""Compares callables on a GPU in one run: checked, then interleaved with rests, each launch with a cold L2 cache.

A GPU throttles on power, so absolute figures drift from run to run and whoever runs later in a run is punished.
A claim is therefore a ratio between contenders of one run, and the run says how fast its GPU was (`Run`).

    with Run("my comparison", json_path="out.json") as run:
        run.compare("4096 x 4096", {"ours": ours, "torch": theirs}, bytes=3 * 2**25, check=CloseTo(expected, 1e-2))
"""

from __future__ import annotations

import json
import random
import statistics
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, Protocol

import torch
from machine import Gpu

NO_GPU = 2
"""The exit status of a script that needs a GPU where there is none."""


@dataclass(frozen=True, kw_only=True)
class Plan:
    """How long and how often to measure. Every round rests before each contender's burst, in a random order."""

    rounds: int = 5
    burst_ms: float = 15.0
    rest_s: float = 0.15
    min_launches: int = 3
    max_launches: int = 100
    seed: int = 0

    def launches(self, ms: float) -> int:
        """Launches in a burst of something that takes `ms`."""
        return max(self.min_launches, min(self.max_launches, round(self.burst_ms / max(ms, 1e-6))))


@dataclass(frozen=True, kw_only=True)
class Row:
    """What a contender came to. `ms` is the median over rounds of a burst's median, `spread` (max - min) / ms.

    status: "ok"; "missing" (not installed), "wrong" (its result failed the check) or "failed" (it raised), and `note`
    says why. An "ok" row has a note if the host could not keep the GPU busy.
    """

    name: str
    status: str = "ok"
    ms: float | None = None
    spread: float | None = None
    launches: int = 0
    tflops: float | None = None
    gbps: float | None = None
    vs_baseline: float | None = None
    vs_best_peer: float | None = None
    note: str = ""


@dataclass(frozen=True)
class Burst:
    """Milliseconds of each launch, and whether the host took longer to launch than the GPU to run."""

    ms: list[float]
    host_bound: bool = False


class Timer(Protocol):
    """Runs a callable and says how long it took."""

    def estimate(self, call: Callable) -> float: ...

    def burst(self, call: Callable, launches: int) -> Burst: ...


class CudaTimer:
    """Times launches by events on the current stream. Before each it overwrites a buffer larger than the L2 cache."""

    def __init__(self):
        cache = getattr(torch.cuda.get_device_properties(None), "L2_cache_size", 0)
        self._cache = torch.empty(max(256 << 20, 4 * cache), dtype=torch.int8, device="cuda")

    def estimate(self, call: Callable) -> float:
        """Milliseconds of one call, after two that warm up."""
        for _ in range(2):
            call()
        torch.cuda.synchronize()
        return min(self.burst(call, 3).ms)

    def burst(self, call: Callable, launches: int) -> Burst:
        events = [[torch.cuda.Event(enable_timing=True) for _ in range(2)] for _ in range(launches)]
        torch.cuda.synchronize()
        began = time.perf_counter()
        # The host gets ahead here, so that its time for the first launches is not counted as the GPU's.
        for _ in range(8):
            self._cache.zero_()
        for start, end in events:
            self._cache.zero_()
            start.record()
            call()
            end.record()
        host = time.perf_counter() - began
        torch.cuda.synchronize()
        total = time.perf_counter() - began
        return Burst([start.elapsed_time(end) for start, end in events], host_bound=host > 0.95 * total)


class Check(Protocol):
    """Decides whether a contender's result may be timed."""

    def prepare(self) -> None:
        """Called before the contender."""

    def fault(self, result: Any) -> str | None:
        """What is wrong with the result, or None."""


@dataclass(frozen=True)
class CloseTo:
    """Passes results whose relative Frobenius distance from `expected` (a tensor or a tuple) is at most `tolerance`."""

    expected: Any
    tolerance: float

    def prepare(self) -> None:
        """Leave NaN in the memory that the allocator gives next, so that an element nobody writes is seen."""
        for tensor in _as_tuple(self.expected):
            if tensor.is_cuda:
                _ = [torch.full_like(tensor, float("nan"), dtype=dtype) for dtype in (torch.float32, torch.bfloat16)]

    def fault(self, result: Any) -> str | None:
        found, expected = _as_tuple(result), _as_tuple(self.expected)
        if len(found) != len(expected):
            return f"returned {len(found)} tensors, expected {len(expected)}"
        for i, (got, want) in enumerate(zip(found, expected, strict=True)):
            where = f"output {i}: " if len(found) > 1 else ""
            if got.shape != want.shape:
                return f"{where}shape {tuple(got.shape)}, expected {tuple(want.shape)}"
            error = relative_error(got, want)
            if not error <= self.tolerance:
                return f"{where}relative error {error:.2e} is above {self.tolerance:.0e}"
        return None


def _as_tuple(value: Any) -> tuple:
    return tuple(value) if isinstance(value, (tuple, list)) else (value,)


def relative_error(got: torch.Tensor, want: torch.Tensor) -> float:
    """||got - want|| / ||want|| in float32 or better; NaN if either holds one."""
    dtype = torch.promote_types(torch.float32, want.dtype)
    got, want = got.detach().to(dtype), want.detach().to(dtype)
    distance, size = torch.linalg.vector_norm(got - want).item(), torch.linalg.vector_norm(want).item()
    return distance / size if size else distance


class Deferred:
    """A contender made by `setup()` at its first call, so that a setup that raises is a row and not the end."""

    def __init__(self, setup: Callable[[], Callable]):
        self._setup, self._call = setup, None

    def __call__(self):
        if self._call is None:
            self._call = self._setup()
        return self._call()


def one_line(error: BaseException, limit: int = 140) -> str:
    """An exception in a line."""
    text = " ".join(f"{type(error).__name__}: {error}".split())
    return text if len(text) <= limit else text[: limit - 3] + "..."


def compare(
    contenders: Mapping[str, Callable[[], Any]],
    *,
    flops: float | Mapping[str, float] | None = None,
    bytes: float | None = None,
    check: Check | Mapping[str, Check] | None = None,
    missing: Mapping[str, str] | None = None,
    baseline: str | None = None,
    ours: str = "ours",
    plan: Plan | None = None,
    timer: Timer | None = None,
    sleep: Callable[[float], None] = time.sleep,
) -> list[Row]:
    """Measure every contender, interleaved. Returns a row each, in the order given, the missing ones last.

    flops, bytes: of one call, for TFLOP/s and GB/s. flops and check may be given by name. missing: name -> why it is
    not here. baseline: whose speed is 1 in `vs_baseline`. ours: the first word of the contenders that are no peers,
    which are left out of the best peer's choice.
    """
    plan, timer = plan or Plan(), timer or CudaTimer()
    rows = {name: _admit(name, call, _of(check, name)) for name, call in contenders.items()}
    estimates = {}
    for name, row in rows.items():
        if row.status == "ok":
            rows[name] = _guarded(row, lambda n=name: estimates.__setitem__(n, timer.estimate(contenders[n])))
    rows.update(_interleave(rows, contenders, estimates, plan, timer, sleep))
    for name, reason in (missing or {}).items():
        rows[name] = Row(name=name, status="missing", note=reason)
    rated = [_rate(row, _of(flops, row.name), bytes) for row in rows.values()]
    return _ratios(rated, baseline, ours)


def _of(given, name: str):
    return given.get(name) if isinstance(given, Mapping) else given


def _admit(name: str, call: Callable, check: Check | None) -> Row:
    row = Row(name=name)
    if check is None:
        return row
    faults = []

    def run():
        check.prepare()
        faults.append(check.fault(call()))

    row = _guarded(row, run)
    return replace(row, status="wrong", note=faults[0]) if faults and faults[0] else row


def _guarded(row: Row, run: Callable) -> Row:
    """`row`, or its failure if `run` raises."""
    try:
        run()
    except Exception as error:
        return replace(row, status="failed", note=one_line(error))
    return row


def _interleave(rows, contenders, estimates, plan: Plan, timer: Timer, sleep) -> dict[str, Row]:
    order, shuffle = [name for name, row in rows.items() if row.status == "ok"], random.Random(plan.seed).shuffle
    medians = {name: [] for name in order}
    launches = {name: plan.launches(estimates[name]) for name in order}
    late, rows = set(), {name: rows[name] for name in order}

    def measure(name: str):
        burst = timer.burst(contenders[name], launches[name])
        medians[name].append(statistics.median(burst.ms))
        if burst.host_bound:
            late.add(name)

    for _ in range(plan.rounds):
        shuffle(order)
        for name in order:
            if rows[name].status == "ok":
                sleep(plan.rest_s)
                rows[name] = _guarded(rows[name], lambda n=name: measure(n))
    return {name: _summary(row, medians[name], launches[name], name in late) for name, row in rows.items()}


def _summary(row: Row, medians: list[float], launches: int, late: bool) -> Row:
    if row.status != "ok":
        return row
    ms = statistics.median(medians)
    note = "host-bound: the GPU waited for launches" if late else ""
    return replace(row, ms=ms, spread=(max(medians) - min(medians)) / ms, launches=launches * len(medians), note=note)


def _rate(row: Row, flops: float | None, bytes: float | None) -> Row:
    if row.ms is None:
        return row
    return replace(row, tflops=flops and flops / row.ms / 1e9, gbps=bytes and bytes / row.ms / 1e6)


def _ratios(rows: list[Row], baseline: str | None, ours: str) -> list[Row]:
    """Speed of each row over the baseline's and over the fastest peer's."""
    base = next((row.ms for row in rows if row.name == baseline and row.ms), None)
    best = min((row.ms for row in rows if row.ms and row.name.split()[0] != ours), default=None)
    return [
        replace(row, vs_baseline=base and base / row.ms, vs_best_peer=best and best / row.ms) if row.ms else row
        for row in rows
    ]


def table(rows: list[Mapping[str, Any]]) -> str:
    """Rows of equal keys as text in columns: None is "-", the first column and text are left-aligned."""
    if not rows:
        return "(nothing)"
    names = list(rows[0])
    cells = [["-" if row[name] is None else str(row[name]) for name in names] for row in rows]
    widths = [max(len(name), *(len(line[i]) for line in cells)) for i, name in enumerate(names)]
    left = [i == 0 or any(_is_words(row[name]) for row in rows) for i, name in enumerate(names)]
    lines = []
    for line in [names, *cells]:
        padded = [c.ljust(w) if at_left else c.rjust(w) for c, w, at_left in zip(line, widths, left, strict=True)]
        lines.append("  ".join(padded).rstrip())
    return "\n".join(lines)


def _is_words(value) -> bool:
    try:
        return isinstance(value, str) and float(value.rstrip("%")) is None
    except ValueError:
        return True


def _show(value: float | None, form: str) -> str | None:
    return None if value is None else format(value, form)


def rows_text(rows: list[Row]) -> str:
    """Rows of `compare` as a table for people; columns that no row fills are left out."""
    lines = [
        {
            "contender": row.name,
            "ms": _show(row.ms, ".4f"),
            "spread": _show(row.spread, ".1%"),
            "TFLOP/s": _show(row.tflops, ".1f"),
            "GB/s": _show(row.gbps, ".0f"),
            "vs baseline": _show(row.vs_baseline, ".3f"),
            "vs best peer": _show(row.vs_best_peer, ".3f"),
            "note": f"{row.status}: {row.note}" if row.status != "ok" else row.note or None,
        }
        for row in rows
    ]
    filled = [name for name in lines[0] if any(line[name] is not None for line in lines)] if lines else []
    return table([{name: line[name] for name in filled} for line in lines])


class Run:
    """A series of comparisons on one machine: says what it ran on and how fast that was, before and after.

    `gpu` answers `describe()` and `state()` with dicts of plain values. The JSON is rewritten after every comparison.
    """

    def __init__(self, title: str, *, json_path=None, plan: Plan | None = None, timer: Timer | None = None, gpu=None):
        self.plan, self.timer = plan or Plan(), timer or CudaTimer()
        self._path = Path(json_path) if json_path else None
        self._gpu = gpu or Gpu(self.timer)
        self.report = {"title": title, "machine": self._gpu.describe(), "plan": asdict(self.plan), "cases": []}

    def __enter__(self):
        print(self.report["title"], *(f"  {key}: {value}" for key, value in self.report["machine"].items()), sep="\n")
        self._note_state("before")
        return self

    def compare(
        self, label: str, contenders: Mapping[str, Callable], *, case: dict | None = None, **options
    ) -> list[Row]:
        """`harness.compare`, printed under `label`; `case` is what the JSON says about it."""
        rows = compare(contenders, plan=self.plan, timer=self.timer, **options)
        base = options.get("baseline")
        print(f"\n{label}{f' (baseline {base})' if base else ''}\n{rows_text(rows)}", flush=True)
        self.report["cases"].append({"label": label, **(case or {}), "rows": [asdict(row) for row in rows]})
        self._save()
        return rows

    def note(self, figures: Mapping[str, float]) -> None:
        """Print figures that follow from the last comparison, and put them beside its rows."""
        if not figures:
            return
        print(", ".join(f"{name} {value:.3f}" for name, value in figures.items()), flush=True)
        self.report["cases"][-1].update(figures)
        self._save()

    def __exit__(self, *exception):
        self._note_state("after")
        self._save()

    def _note_state(self, when: str):
        self.report[when] = self._gpu.state()
        print(f"\n{when}: " + ", ".join(f"{key} {value}" for key, value in self.report[when].items()), flush=True)

    def _save(self):
        if self._path:
            write_json(self._path, self.report)


def write_json(path, data) -> None:
    """Write `data`, making the folder."""
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(data, indent=1) + "\n")


def require_gpu(program: str) -> None:
    """Exit with status 2 and a sentence if torch sees no GPU."""
    if not torch.cuda.is_available():
        print(f"{program} measures a GPU, and torch {torch.__version__} sees none on this machine.", file=sys.stderr)
        raise SystemExit(NO_GPU)
