"""A project of one small kernel, around the real build files: what building does can be seen in seconds."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
BUILD_FILES = ("build_aot.py", "setup.py", "pyproject.toml", "MANIFEST.in", "LICENSE")

_KERNEL = """
import triton
import triton.language as tl


@triton.jit
def scale(x_ptr, n, FACTOR: tl.constexpr):
    tl.static_assert(FACTOR != 13, "thirteen is refused")
    offs = tl.program_id(0) * 128 + tl.arange(0, 128)
    x = tl.load(x_ptr + offs, mask=offs < n)
    tl.store(x_ptr + offs, x * FACTOR, mask=offs < n)
"""
_DECLARED = """
VARIANTS = {variants!r}


def declared(profile, target):
    return VARIANTS


def axes(profile):
    return [("factor", VARIANTS, "somebody multiplies by each")]
"""
_SPECS = """
from .jit.spec import KernelSpec


def specs_of(variant, target):
    module, factor = variant.split()
    return (
        KernelSpec(
            module=f"flashattn.kernels.{module}",
            kernel="scale",
            signature=(("x_ptr", "*fp32"), ("n", "i32"), ("FACTOR", "constexpr")),
            constants=(("FACTOR", int(factor)),),
            alignment=(("x_ptr", 16),),
            options=(("num_warps", 4),),
            target=target,
        ),
    )
"""


class TinyProject:
    """A source tree in `root`. A variant is the file of its kernel and a factor: "scale 2"."""

    def __init__(self, root: Path, variants: tuple[str, ...] = ("scale 2", "scale 3")):
        self.root = root
        self.package = root / "src" / "flashattn"
        self.aot = self.package / "_aot"
        shutil.copytree(ROOT / "src" / "flashattn" / "jit", self.package / "jit", ignore=shutil.ignore_patterns("__p*"))
        (self.package / "kernels").mkdir()
        for name in BUILD_FILES:
            shutil.copy(ROOT / name, root)
        shutil.copy(ROOT / "src" / "flashattn" / "_version.py", self.package)
        self.write("README.md", "tiny\n")
        self.write("src/flashattn/__init__.py", "raise ImportError('building must not run the package')\n")
        self.write("src/flashattn/kernels/__init__.py", "")
        self.write("src/flashattn/kernels/scale.py", _KERNEL)
        self.write("src/flashattn/specs.py", _SPECS)
        self.declare(*variants)

    def write(self, path: str, text: str) -> Path:
        (self.root / path).write_text(text)
        return self.root / path

    def declare(self, *variants: str) -> None:
        self.write("src/flashattn/declared.py", _DECLARED.format(variants=variants))

    def run(self, *command, **environ: str) -> subprocess.CompletedProcess:
        """Run Python with `command` in the tree. A module torch that cannot be imported is first on its path."""
        poisoned = self.root.parent / f"{self.root.name}-poisoned"
        poisoned.mkdir(exist_ok=True)
        (poisoned / "torch.py").write_text("raise ImportError('no torch here')\n")
        kept = {name: value for name, value in os.environ.items() if not name.startswith(("FLASHATTN_", "TRITON_"))}
        return subprocess.run(
            [sys.executable, *map(str, command)],
            cwd=self.root,
            env={**kept, "PYTHONPATH": str(poisoned), **environ},
            capture_output=True,
            text=True,
            check=False,
            timeout=300,
        )

    def build(self, *options, targets: str = "sm_90", **environ: str) -> subprocess.CompletedProcess:
        return self.run("build_aot.py", "--targets", targets, *options, **environ)
