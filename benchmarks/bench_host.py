"""Host microseconds of a small eager attention call, against PyTorch's own: best of several repeats of many calls.

    python benchmarks/bench_host.py --json out.json

The GPU's queue takes the calls, so what is timed is Python, checks, allocation and launch. Contenders alternate.
Each gets its own natural layout. Without a GPU it runs too, and a call's time then contains the arithmetic.
"""

from __future__ import annotations

import argparse
import random
import statistics
import time
from collections.abc import Callable
from contextlib import ExitStack

import torch
import torch.nn.functional as F
from harness import one_line, table, write_json
from machine import software
from torch.nn.attention import SDPBackend, sdpa_kernel

SHAPE = (1, 128, 8, 64)
BACKENDS = {"sdpa fa2": SDPBackend.FLASH_ATTENTION, "sdpa cudnn": SDPBackend.CUDNN_ATTENTION}


def _sdpa(q, k, v):
    return F.scaled_dot_product_attention(q, k, v, is_causal=True)


def contenders(device: str, requires_grad: bool) -> tuple[dict[str, Callable], dict[str, str]]:
    """Calls without arguments, by name, and why a name is missing. SDPA gets (batch, heads, seqlen, head_dim)."""
    dtype = torch.bfloat16 if device == "cuda" else torch.float32
    ours = [torch.randn(SHAPE, device=device, dtype=dtype, requires_grad=requires_grad) for _ in range(3)]
    theirs = [tensor.detach().transpose(1, 2).contiguous().requires_grad_(requires_grad) for tensor in ours]
    calls, missing = {"sdpa": lambda: _sdpa(*theirs)}, {}
    if device == "cuda":
        calls |= dict.fromkeys(BACKENDS, calls["sdpa"])
    else:
        missing = dict.fromkeys(BACKENDS, "needs a GPU")
    try:
        from flashattn import flash_attn_func
    except ImportError as error:
        return calls, {"ours": f"not installed (pip install .): {one_line(error)}", **missing}
    return {"ours": lambda: flash_attn_func(*ours, causal=True), **calls}, missing


def repeat(name: str, call: Callable, count: int, sync: Callable) -> float:
    """Microseconds of one call, over `count` calls whose results are dropped."""
    with ExitStack() as stack:
        # The backend is chosen once, outside the time.
        if name in BACKENDS:
            stack.enter_context(sdpa_kernel(BACKENDS[name]))
        for _ in range(max(1, count // 10)):
            call()
        sync()
        began = time.perf_counter()
        for _ in range(count):
            call()
        taken = time.perf_counter() - began
        sync()
    return 1e6 * taken / count


def measure(calls: dict[str, Callable], repeats: int, count: int, sync: Callable) -> dict[str, list[float] | str]:
    """Name -> microseconds of each repeat, or why it failed."""
    found, order, shuffle = {name: [] for name in calls}, list(calls), random.Random(0).shuffle
    for _ in range(repeats):
        shuffle(order)
        for name in order:
            if not isinstance(found[name], str):
                try:
                    found[name].append(repeat(name, calls[name], count, sync))
                except Exception as error:
                    found[name] = one_line(error)
    return found


def rows_of(mode: str, found: dict, missing: dict[str, str]) -> list[dict]:
    base = found.get("sdpa")
    rows = []
    for name, times in {**found, **missing}.items():
        row = {"mode": mode, "contender": name, "best_us": None, "median_us": None, "vs_sdpa": None, "note": None}
        if isinstance(times, str):
            row["note"] = f"{'missing' if name in missing else 'failed'}: {times}"
        else:
            row |= {"best_us": round(min(times), 2), "median_us": round(statistics.median(times), 2)}
            row["vs_sdpa"] = round(min(times) / min(base), 3) if isinstance(base, list) else None
        rows.append(row)
    return rows


def main(argv=None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--repeats", type=int, default=10)
    parser.add_argument("--calls", type=int, default=300)
    parser.add_argument("--json", metavar="FILE", help="write the figures here too")
    chosen = parser.parse_args(argv)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    sync = torch.cuda.synchronize if device == "cuda" else lambda: None
    note = "" if device == "cuda" else " (no GPU here: the arithmetic is in these times)"
    print(f"Host time of a call, {SHAPE} causal, on {device}{note}; best of {chosen.repeats} x {chosen.calls}")
    rows = []
    for mode, requires_grad in (("no grad", False), ("grad recorded", True)):
        calls, missing = contenders(device, requires_grad)
        rows += rows_of(mode, measure(calls, chosen.repeats, chosen.calls, sync), missing)
    print(table(rows))
    if chosen.json:
        write_json(chosen.json, {"title": "Host time", "machine": software(), "device": device, "rows": rows})
    return int(any("failed" in (row["note"] or "") for row in rows))


if __name__ == "__main__":
    raise SystemExit(main())
