"""Registers, stack and shared memory of a kernel with given tiles, as its assembler says. Needs no GPU.

    python benchmarks/kernel_resources.py --kernel bwd_dkdv --head-dim 64 --mask causal --tiles 64x128w8s2 32x128w4s2

A stack of more than 0 bytes is registers spilled to memory. NVIDIA targets only.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import tempfile
from pathlib import Path

from tile_candidates import KERNELS, tile_argument, with_tile

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))


def usage_of(code: bytes) -> dict[str, str]:
    """What cuobjdump, which Triton brings, says of a cubin: {"REG": ..., "STACK": ..., ...}."""
    import triton

    tool = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump"
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(code)
        file.flush()
        said = subprocess.run([tool, "-res-usage", file.name], capture_output=True, text=True, check=True).stdout
    return dict(word.split(":", 1) for word in said.splitlines()[-1].split() if ":" in word)


def main(argv=None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--kernel", choices=KERNELS, required=True)
    parser.add_argument("--head-dim", type=int, required=True)
    parser.add_argument("--mask", choices=("full", "causal", "window"), default="full")
    parser.add_argument("--dtype", choices=("bf16", "fp16"), default="bf16")
    parser.add_argument("--target", default="sm_90")
    parser.add_argument("--tiles", nargs="+", type=tile_argument, metavar="128x64w4s3", help="default: the table's")
    chosen = parser.parse_args(argv)
    import build_aot
    from flashattn.jit.compile import CompileError, compile_spec

    only = f"{chosen.kernel} {chosen.dtype} d{chosen.head_dim} {chosen.mask}"
    (spec,) = build_aot.declared_specs("core", chosen.target, only).values()
    specs = [with_tile(spec, tile) for tile in chosen.tiles] if chosen.tiles else [spec]
    for spec in specs:
        try:
            made = compile_spec(spec, source_digest=build_aot.source_digest(build_aot.KERNELS))
        except CompileError as error:
            print(error)
            continue
        usage = usage_of(made.code)
        print(f"{spec.label()}: {usage['REG']} registers, {usage['STACK']} B stack, {made.meta['shared']} B shared")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
