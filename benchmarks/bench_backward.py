"""Backward attention through autograd: milliseconds, TFLOP/s and ratios, on 16k tokens of hidden size 2048.

    python benchmarks/bench_backward.py --head-dims 64 128 --seqlens 4096 --contenders ours fa2 cudnn --json out.json

One call is `torch.autograd.grad` of q, k and v with the graph retained: it counts 2.5 forwards of operations.
Gradients are checked against float32 before they are timed.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from bench_forward import dense_problems, parse_arguments, sweep
from harness import CloseTo, Deferred, require_gpu
from peers import Prepare
from problems import Packed, Problem

TOLERANCE = 2e-2


def backward_case(problem: Problem | Packed, functions: Mapping[str, Prepare]) -> dict:
    inputs = problem.tensors(3, requires_grad=True)
    (grad,) = problem.tensors(1, seed=1)

    def deferred(prepare):
        def setup():
            output = prepare(problem)(*inputs)
            return lambda: torch.autograd.grad(output, inputs, grad, retain_graph=True)

        return Deferred(setup)

    return {
        "contenders": {name: deferred(prepare) for name, prepare in functions.items()},
        "flops": problem.backward_flops,
        "check": CloseTo(problem.reference_backward(*inputs, grad), TOLERANCE),
    }


def main(argv=None) -> int:
    chosen = parse_arguments(__doc__.splitlines()[0], argv)
    require_gpu("bench_backward.py")
    return sweep("Attention backward", chosen, dense_problems(chosen), {"backward": backward_case})


if __name__ == "__main__":
    raise SystemExit(main())
