"""Packed sequences of different lengths: milliseconds, TFLOP/s and ratios, on 32k tokens of hidden size 2048.

    python benchmarks/bench_varlen.py --patterns uniform longtail --masks causal --forward --json out.json

The patterns are those of `problems.lengths_of`, with a fixed seed. FLOPs are of the sequences' own pairs, a causal mask
counting half. FlexAttention gets a mask of documents; its blocks are built outside the timed call, as in training,
where the layers of a step share them. Where all sequences have one length, "ours dense" is ours on them as a dense
batch, in the same memory. Every contender is checked against float32, sequence by sequence, before it is timed.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterator

import peers
import problems
from bench_backward import backward_case
from bench_forward import MASKS, forward_case, options, sweep
from harness import Row, require_gpu
from problems import PATTERNS, Packed, lengths_of

CASES = {"forward": forward_case, "backward": backward_case}


def add_directions(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--forward", action="append_const", dest="directions", const="forward")
    parser.add_argument(
        "--backward", action="append_const", dest="directions", const="backward", help="default: both directions"
    )


def cases_of(chosen: argparse.Namespace, beside: Callable) -> dict[str, Callable]:
    """The chosen directions' cases, each with what `beside` adds to it."""
    return {direction: beside(CASES[direction]) for direction in chosen.directions or CASES}


def with_dense(case: Callable) -> Callable:
    """The case with "ours dense" beside ours where the sequences make a dense batch."""

    def made(problem: Packed, functions: dict) -> dict:
        dense = problem.dense()
        if "ours" in functions and dense:
            functions = {**functions, "ours dense": lambda _: as_dense(functions["ours"](dense), dense)}
        return case(problem, functions)

    return made


def as_dense(attend: Callable, dense: problems.Problem) -> Callable:
    """`attend` of packed tensors, by views."""

    def packed(*tensors):
        return attend(*(tensor.unflatten(0, dense.shape[:2]) for tensor in tensors)).flatten(0, 1)

    return packed


def over_dense(problem: Packed, rows: list[Row]) -> dict[str, float]:
    times = {row.name: row.ms for row in rows if row.ms}
    if not {"ours", "ours dense"} <= set(times):
        return {}
    return {"time over dense time": times["ours"] / times["ours dense"]}


def packed_problems(chosen: argparse.Namespace) -> Iterator[Packed]:
    for pattern in chosen.patterns:
        lengths = lengths_of(pattern, chosen.tokens, chosen.seqlen)
        for head_dim in chosen.head_dims:
            for mask in chosen.masks:
                yield Packed(
                    pattern=pattern,
                    lengths=lengths,
                    heads=max(1, problems.HIDDEN // head_dim),
                    head_dim=head_dim,
                    causal=mask == "causal",
                    dtype=chosen.dtype,
                )


def main(argv=None) -> int:
    parser = options(__doc__.splitlines()[0], head_dims=(64, 128), contenders=peers.MASKED)
    add_directions(parser)
    parser.add_argument("--patterns", nargs="+", choices=PATTERNS, default=list(PATTERNS))
    parser.add_argument("--masks", nargs="+", choices=MASKS, default=list(MASKS))
    parser.add_argument("--tokens", type=int, default=32768)
    parser.add_argument("--seqlen", type=int, default=2048, help="the longest a sequence can be")
    chosen = parser.parse_args(argv)
    require_gpu("bench_varlen.py")
    return sweep("Packed sequences", chosen, packed_problems(chosen), cases_of(chosen, with_dense), over_dense)


if __name__ == "__main__":
    raise SystemExit(main())
