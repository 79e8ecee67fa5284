"""The declared kernels, compiled for GPUs that are not here."""

from __future__ import annotations

import importlib.metadata
import json
import os
import random
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from tiny_project import ROOT

from flashattn._version import __version__
from flashattn.declared import declared
from flashattn.jit import lockfile
from flashattn.jit.compile import compile_spec
from flashattn.jit.resolve import Resolver
from flashattn.jit.spec import source_digest
from flashattn.jit.targets import SUPPORTED, target_of
from flashattn.settings import Settings
from flashattn.specs import specs_of

KERNELS = ROOT / "src" / "flashattn" / "kernels"
SAMPLE = 20

_COMPILE = """
import json, sys
import build_aot
from flashattn.jit.compile import compile_spec
wanted = json.load(sys.stdin)
digest = build_aot.source_digest(build_aot.KERNELS)
made = {}
for target in sorted(set(wanted.values())):
    for key, spec in build_aot.declared_specs("core", target).items():
        if key in wanted:
            made[key] = compile_spec(spec, source_digest=digest).meta["code_sha256"]
print(json.dumps(made))
"""


@pytest.mark.newest
@pytest.mark.parametrize("target", SUPPORTED)
def test_each_kernel_compiles_and_fits_its_target(target):
    first_of_each = {}
    for variant in declared("core", target):
        for spec in specs_of(variant, target):
            first_of_each.setdefault(spec.kernel, spec)
    assert first_of_each
    for spec in first_of_each.values():
        artifact = compile_spec(spec, source_digest=source_digest(KERNELS))
        assert artifact.meta["shared"] <= target_of(target).shared_limit
        assert artifact.code.startswith(b"\x7fELF")


def test_a_sample_compiled_elsewhere_has_the_bytes_of_the_lock_file(tmp_path):
    lock = lockfile.read(ROOT / "aot.lock")
    triton = importlib.metadata.version("triton")
    if triton != lock.triton:
        pytest.skip(f"aot.lock was written with Triton {lock.triton}, here is {triton}")
    # Another sample for other kernels, the same one for everybody who has these.
    sample = random.Random(lock.source_digest).sample(sorted(lock.rows), min(SAMPLE, len(lock.rows)))
    tree = tmp_path / "another folder"
    shutil.copytree(ROOT / "src", tree / "src", ignore=shutil.ignore_patterns("__pycache__", "_aot"))
    shutil.copy(ROOT / "build_aot.py", tree)
    done = subprocess.run(
        [sys.executable, "-c", _COMPILE],
        cwd=tree,
        env={"PATH": "/usr/bin:/bin", "PYTHONHASHSEED": "1", "HOME": str(tmp_path)},
        input=json.dumps({key: lock.rows[key].target for key in sample}),
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    made = json.loads(done.stdout.splitlines()[-1])
    other = [lock.rows[key].label for key in sample if made.get(key) != lock.rows[key].code_sha256]
    assert not other, "machine code that aot.lock does not have; `make lock` writes it anew"


@pytest.mark.newest
@pytest.mark.skipif("AOT_OF_ANOTHER_TRITON" not in os.environ, reason="only `make test-newest` has two Tritons")
def test_kernels_that_another_triton_compiled_are_used_from_the_wheel():
    folder = Path(os.environ["AOT_OF_ANOTHER_TRITON"])
    made_by = json.loads((folder / "sm_90" / "MANIFEST.json").read_text())["toolchain"]["triton"]
    assert made_by != importlib.metadata.version("triton")
    settings = Settings(disable_jit=True, on_aot_miss="error")
    resolver = Resolver(settings=settings, kernels_dir=KERNELS, version=__version__, aot_dir=folder)
    for variant in declared("core", "sm_90"):
        for spec in specs_of(variant, "sm_90"):
            resolver.resolve(spec)
            assert resolver.decision(spec.key).source == "wheel"
