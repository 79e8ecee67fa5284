"""Forward attention: milliseconds, TFLOP/s and ratios of ours and its peers on 16k tokens of hidden size 2048.

    python benchmarks/bench_forward.py --head-dims 64 128 --seqlens 4096 --contenders ours fa2 cudnn --json out.json

A causal mask counts half the operations. A contender is checked against float32 before it is timed.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterable, Mapping

import peers
import torch
from harness import CloseTo, Deferred, Plan, Run, require_gpu
from problems import Packed, Problem, problems

TOLERANCE = 1e-2
MASKS = ("full", "causal")


def options(description: str, *, head_dims=(64, 128, 256), contenders=peers.DEFAULT) -> argparse.ArgumentParser:
    """The options that every comparison of attention functions has."""
    parser = argparse.ArgumentParser(description=description)
    add = parser.add_argument
    add("--head-dims", type=int, nargs="+", default=list(head_dims))
    add("--dtype", choices=["bfloat16", "float16"], default="bfloat16")
    add(
        "--contenders", nargs="+", choices=[*peers.PEERS, "all"], default=list(contenders), metavar="NAME",
        help=f"of {', '.join(peers.PEERS)}, or all; default {' '.join(contenders)}",
    )  # fmt: skip
    add("--baseline", default="fa2", choices=list(peers.PEERS), metavar="NAME", help="default fa2")
    add("--rounds", type=int, default=Plan.rounds)
    add("--json", metavar="FILE", help="write the figures here too")
    return parser


def parse_arguments(description: str, argv=None) -> argparse.Namespace:
    """The options of both directions' benchmarks of dense attention."""
    parser = options(description)
    parser.add_argument("--seqlens", type=int, nargs="+", default=[1024, 4096, 16384])
    parser.add_argument("--masks", nargs="+", choices=MASKS, default=list(MASKS))
    return parser.parse_args(argv)


def dense_problems(chosen: argparse.Namespace) -> list[Problem]:
    causal = [mask == "causal" for mask in chosen.masks]
    return list(problems(chosen.head_dims, chosen.seqlens, causal, chosen.dtype))


def sweep(
    title: str,
    chosen: argparse.Namespace,
    listed: Iterable[Problem | Packed],
    cases: Mapping[str, Callable],
    figures: Callable | None = None,
) -> int:
    """Compare the chosen contenders in every problem. Returns the exit status: 1 if one of them went wrong.

    listed: of one kind. cases: "forward" or "backward" -> (problem, name -> prepare) -> what `harness.compare` needs.
    figures: (problem, rows) -> {name: figure} that the rows come to.
    """
    names = list(peers.PEERS) if "all" in chosen.contenders else chosen.contenders
    listed, bad = list(listed), False
    loaded = {to: peers.load(names, backward=to == "backward", kind=listed[0].kind) for to in cases}
    with Run(title, json_path=chosen.json, plan=Plan(rounds=chosen.rounds)) as run:
        for problem in listed:
            for direction, case in cases.items():
                found, missing = loaded[direction]
                rows = run.compare(
                    f"{direction}, {problem.label}",
                    case={**problem.as_dict(), "direction": direction},
                    missing=missing,
                    baseline=chosen.baseline,
                    **case(problem, found),
                )
                if figures:
                    run.note(figures(problem, rows))
                bad |= any(row.status in ("wrong", "failed") for row in rows)
                torch.cuda.empty_cache()
    return int(bad)


def forward_case(problem: Problem | Packed, functions: Mapping[str, peers.Prepare]) -> dict:
    inputs = problem.tensors(3)

    def deferred(prepare):
        def setup():
            attend = prepare(problem)
            return lambda: attend(*inputs)

        return Deferred(setup)

    return {
        "contenders": {name: deferred(prepare) for name, prepare in functions.items()},
        "flops": problem.forward_flops,
        "check": CloseTo(problem.reference_forward(*inputs), TOLERANCE),
    }


def main(argv=None) -> int:
    chosen = parse_arguments(__doc__.splitlines()[0], argv)
    require_gpu("bench_forward.py")
    return sweep("Attention forward", chosen, dense_problems(chosen), {"forward": forward_case})


if __name__ == "__main__":
    raise SystemExit(main())
