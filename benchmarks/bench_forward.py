"""Forward attention: milliseconds, TFLOP/s and ratios of ours and its peers on 16k tokens of hidden size 2048.

    python benchmarks/bench_forward.py --head-dims 64 128 --seqlens 4096 --contenders ours fa2 cudnn --json out.json

A causal mask counts half the operations. A contender is checked against float32 before it is timed.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable

import peers
import torch
from harness import CloseTo, Plan, Run, require_gpu
from problems import Problem, problems, reference_forward

TOLERANCE = 1e-2


def parse_arguments(description: str, argv=None) -> argparse.Namespace:
    """The options of both directions' benchmarks."""
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("--head-dims", type=int, nargs="+", default=[64, 128, 256])
    parser.add_argument("--seqlens", type=int, nargs="+", default=[1024, 4096, 16384])
    parser.add_argument("--masks", nargs="+", choices=["full", "causal"], default=["full", "causal"])
    parser.add_argument("--dtype", choices=["bfloat16", "float16"], default="bfloat16")
    parser.add_argument(
        "--contenders", nargs="+", choices=[*peers.PEERS, "all"], default=list(peers.DEFAULT), metavar="NAME",
        help=f"of {', '.join(peers.PEERS)}, or all; default {' '.join(peers.DEFAULT)}",
    )  # fmt: skip
    parser.add_argument("--baseline", default="fa2", choices=list(peers.PEERS), metavar="NAME", help="default fa2")
    parser.add_argument("--rounds", type=int, default=Plan.rounds)
    parser.add_argument("--json", metavar="FILE", help="write the figures here too")
    chosen = parser.parse_args(argv)
    if "all" in chosen.contenders:
        chosen.contenders = list(peers.PEERS)
    return chosen


def sweep(title: str, chosen: argparse.Namespace, case: Callable, *, backward: bool) -> int:
    """Compare the chosen contenders in every chosen problem. Returns the exit status: 1 if one of them went wrong.

    case: (problem, functions) -> what `harness.compare` needs beyond names.
    """
    found, missing = peers.load(chosen.contenders, backward=backward)
    masks = [mask == "causal" for mask in chosen.masks]
    bad = False
    with Run(title, json_path=chosen.json, plan=Plan(rounds=chosen.rounds)) as run:
        for problem in problems(chosen.head_dims, chosen.seqlens, masks, chosen.dtype):
            rows = run.compare(
                problem.label,
                case=problem.as_dict(),
                missing=missing,
                baseline=chosen.baseline,
                **case(problem, found),
            )
            bad |= any(row.status in ("wrong", "failed") for row in rows)
            torch.cuda.empty_cache()
    return int(bad)


def forward_case(problem: Problem, functions: dict[str, Callable]) -> dict:
    q, k, v = problem.tensors(3)
    return {
        "contenders": {name: lambda f=f: f(q, k, v, problem.causal) for name, f in functions.items()},
        "flops": problem.forward_flops,
        "check": CloseTo(reference_forward(q, k, v, problem.causal), TOLERANCE),
    }


def main(argv=None) -> int:
    chosen = parse_arguments(__doc__.splitlines()[0], argv)
    require_gpu("bench_forward.py")
    return sweep("Attention forward", chosen, forward_case, backward=False)


if __name__ == "__main__":
    raise SystemExit(main())
