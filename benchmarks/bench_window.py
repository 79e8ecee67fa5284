"""Sliding windows: milliseconds, TFLOP/s, and what they cost against their visible blocks, at 32k tokens.

    python benchmarks/bench_window.py --windows 1024,0 --head-dims 128 --forward --json out.json

A window left,right is inclusive; one that ends at the query's own key is measured as a causal one. FLOPs are those of
the pairs of a query and a key that it sees. "ours whole" is ours with the same mask and no window, in the same run: a
window should cost its share of the pairs, or of the blocks of 128 x 128 that any pair of it falls in. FlexAttention's
block mask is built outside the timed call. Every contender is checked against float32 before it is timed.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterator
from dataclasses import replace

import peers
import problems
from bench_forward import options, sweep
from bench_varlen import add_directions, cases_of
from harness import Row, require_gpu
from problems import Problem

BLOCK = 128


def with_whole(case: Callable) -> Callable:
    """The case with "ours whole" beside the others, which has its own check and FLOPs."""

    def made(problem: Problem, functions: dict) -> dict:
        found = case(problem, functions)
        if "ours" not in functions:
            return found
        whole = case(replace(problem, window=None), {"ours whole": functions["ours"]})
        same = {key: {**dict.fromkeys(functions, found[key]), "ours whole": whole[key]} for key in ("flops", "check")}
        return {"contenders": found["contenders"] | whole["contenders"], **same}

    return made


def cost(problem: Problem, rows: list[Row]) -> dict[str, float]:
    """Our time over the share of the whole's time that the window's pairs, and its blocks, are."""
    times = {row.name: row.ms for row in rows if row.ms}
    if not {"ours", "ours whole"} <= set(times):
        return {}
    whole, ratio = replace(problem, window=None), times["ours"] / times["ours whole"]
    return {
        "time over the pairs' share": ratio * whole.pairs / problem.pairs,
        "time over the blocks' share": ratio * whole.visible_blocks(BLOCK) / problem.visible_blocks(BLOCK),
    }


def window_argument(text: str) -> tuple[int, int]:
    try:
        left, right = (int(side) for side in text.split(","))
    except ValueError:
        left = right = -1
    if min(left, right) < 0:
        raise argparse.ArgumentTypeError(f"{text!r} is not like 1024,0")
    return left, right


def window_problems(chosen: argparse.Namespace) -> Iterator[Problem]:
    for head_dim in chosen.head_dims:
        for window in chosen.windows:
            yield Problem(
                batch=chosen.batch,
                seqlen=chosen.seqlen,
                heads=max(1, problems.HIDDEN // head_dim),
                head_dim=head_dim,
                causal=window[1] == 0,
                window=window,
                dtype=chosen.dtype,
            )


def main(argv=None) -> int:
    parser = options(__doc__.splitlines()[0], head_dims=(64, 128), contenders=peers.MASKED)
    add_directions(parser)
    parser.add_argument("--windows", nargs="+", type=window_argument, default=[(1024, 0), (128, 0)], metavar="1024,0")
    parser.add_argument("--seqlen", type=int, default=32768)
    parser.add_argument("--batch", type=int, default=1)
    chosen = parser.parse_args(argv)
    require_gpu("bench_window.py")
    return sweep("Sliding windows", chosen, window_problems(chosen), cases_of(chosen, with_whole), cost)


if __name__ == "__main__":
    raise SystemExit(main())
