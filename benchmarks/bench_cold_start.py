"""Seconds of import and of the first call in a fresh process: from the wheel, from the user's cache, and compiled.

    python benchmarks/bench_cold_start.py --json out.json

Each scenario is a process of its own. "as installed" is the environment as it is; "empty cache" and "cache filled"
share a new cache folder; "forced compile" recompiles; "torch" is F.scaled_dot_product_attention; "fa4" is
FlashAttention-4, which compiles too, with its cache on disk off. "both directions" is a forward and its backward in
one figure, from an empty cache again. The GPU's context is made before the clock starts. Without a GPU the reference
runs, and nothing is compiled. Processes that import torch alone and with ours take turns, by the clock.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time

SHAPE = (1, 1024, 8, 64)
_SOURCES = {"wheel": "from the wheel", "cache": "from the user's cache", "compiles": "compiled here"}
_FIELDS = ("import_s", "first_call_s", "second_call_s")
_BOTH = "both directions"
_MISSING = "missing: "
IMPORTS = ("import torch", "import torch, flashattn")


def scenarios(folder: str) -> dict[str, dict[str, str]]:
    """Name -> environment variables, in the order in which they must run. `folder` starts empty."""
    own_cache = {"FLASHATTN_CACHE_DIR": folder}
    no_cache = {"FLASH_ATTENTION_CUTE_DSL_CACHE_ENABLED": "0", "CUTE_DSL_DISABLE_FILE_CACHING": "1"}
    return {
        "as installed": {},
        "empty cache": own_cache,
        "cache filled": own_cache,
        "forced compile": {**own_cache, "FLASHATTN_FORCE_JIT": "1"},
        f"empty cache, {_BOTH}": {"FLASHATTN_CACHE_DIR": os.path.join(folder, "both")},
        "torch": {},
        "fa4": no_cache,
        f"fa4, {_BOTH}": no_cache,
    }


def child(scenario: str) -> dict:
    """Times of this process, which must have imported nothing yet."""
    import torch

    began = time.perf_counter()
    try:
        attend, sources = _library(scenario)
    except ImportError as error:
        return {"note": f"{_MISSING}{error}"}
    import_s = time.perf_counter() - began
    device = "cuda" if torch.cuda.is_available() else "cpu"
    dtype = torch.bfloat16 if device == "cuda" else torch.float32
    both = scenario.endswith(_BOTH)
    q, k, v, grad = (torch.randn(SHAPE, device=device, dtype=dtype) for _ in range(4))
    for tensor in (q, k, v) if both else ():
        tensor.requires_grad_()
    sync = torch.cuda.synchronize if device == "cuda" else lambda: None
    times = []
    for _ in range(2):
        sync()
        began = time.perf_counter()
        out = attend(q, k, v)
        if both:
            torch.autograd.grad(out, (q, k, v), grad)
        sync()
        times.append(time.perf_counter() - began)
    found = {"import_s": import_s, "first_call_s": times[0], "second_call_s": times[1], "device": device}
    return {**found, **(_kernels(sources, q, k, v) if sources and device == "cuda" else {})}


def _library(scenario: str):
    """What the scenario calls, imported: (attend, the package's `explain` or None)."""
    if scenario == "torch":
        return _torch_attend, None
    if scenario.startswith("fa4"):
        from flash_attn.cute import flash_attn_func

        return lambda q, k, v: flash_attn_func(q, k, v, causal=True)[0], None
    import flashattn

    return lambda q, k, v: flashattn.flash_attn_func(q, k, v, causal=True), flashattn.explain


def _torch_attend(q, k, v):
    from torch.nn.functional import scaled_dot_product_attention

    return scaled_dot_product_attention(q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2), is_causal=True)


def _kernels(explain, q, k, v) -> dict:
    """How many of the call's kernels came from where, as `flashattn.explain` says."""
    text = str(explain(q, k, v, causal=True))
    return {source: text.count(phrase) for source, phrase in _SOURCES.items()}


def run_child(scenario: str, environment: dict[str, str]) -> dict:
    """The child's report. Raises RuntimeError with the last line of what it said if it fails."""
    command = [sys.executable, os.path.abspath(__file__), "--child", scenario]
    done = subprocess.run(command, env={**os.environ, **environment}, capture_output=True, text=True, check=False)
    if done.returncode:
        raise RuntimeError((done.stderr.strip().splitlines() or [f"exit status {done.returncode}"])[-1])
    return json.loads(done.stdout.splitlines()[-1])


def measure(repeats: int, chosen=None) -> list[dict]:
    """A row a scenario (of those chosen): medians over `repeats` rounds, each with a new cache folder."""
    found = {}
    for _ in range(repeats):
        with tempfile.TemporaryDirectory(prefix="flashattn-bench-") as folder:
            for name, environment in scenarios(folder).items():
                if chosen and name not in chosen:
                    continue
                try:
                    found.setdefault(name, []).append(run_child(name, environment))
                except RuntimeError as error:
                    found.setdefault(name, []).append({"note": f"failed: {error}"})
    return [row_of(name, reports) for name, reports in found.items()]


def import_times(repeats: int, run=subprocess.run) -> list[dict]:
    """A row a statement of IMPORTS: seconds by the clock in fresh processes, which take turns."""
    times = {statement: [] for statement in IMPORTS}
    for _ in range(repeats):
        for statement, found in times.items():
            program = f"import time; began = time.perf_counter(); {statement}; print(time.perf_counter() - began)"
            done = run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
            found.append(float(done.stdout.splitlines()[-1]))
    base = statistics.median(times[IMPORTS[0]])
    return [
        {
            "statement": statement,
            "median_s": round(statistics.median(found), 4),
            "best_s": round(min(found), 4),
            "more_s": round(statistics.median(found) - base, 4),
        }
        for statement, found in times.items()
    ]


def row_of(scenario: str, reports: list[dict]) -> dict:
    """Medians of the reports; a failure's note instead, if there is one."""
    note = next((report["note"] for report in reports if "note" in report), None)
    row = {"scenario": scenario, **dict.fromkeys([*_FIELDS, *_SOURCES]), "note": note}
    if note is None:
        row |= {field: round(statistics.median(report[field] for report in reports), 4) for field in _FIELDS}
        row |= {source: reports[-1].get(source) for source in _SOURCES}
    return row


def main(argv=None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--imports", type=int, default=7, help="processes for each import's time")
    parser.add_argument(
        "--scenarios",
        nargs="+",
        choices=scenarios(""),
        metavar="NAME",
        help='default: all; "cache filled" needs "empty cache"',
    )
    parser.add_argument("--json", metavar="FILE", help="write the figures here too")
    parser.add_argument("--child", choices=scenarios(""), help=argparse.SUPPRESS)
    chosen = parser.parse_args(argv)
    if chosen.child:
        print(json.dumps(child(chosen.child)))
        return 0
    from harness import table, write_json
    from machine import software

    print(f"First call in a fresh process, {SHAPE} causal; median of {chosen.repeats}")
    rows = measure(chosen.repeats, chosen.scenarios)
    print(table(rows))
    imports = import_times(chosen.imports) if chosen.imports else []
    print(f"\nSeconds of an import in a fresh process, of {chosen.imports}\n{table(imports)}")
    if chosen.json:
        write_json(chosen.json, {"title": "Cold start", "machine": software(), "rows": rows, "imports": imports})
    return int(any(row["note"] and not row["note"].startswith(_MISSING) for row in rows))


if __name__ == "__main__":
    raise SystemExit(main())
