"""The declared kernels, compiled for GPUs that are not here."""

from __future__ import annotations

import importlib.metadata
import json
import os
from pathlib import Path

import pytest
from tiny_project import ROOT

from flashattn._version import __version__
from flashattn.declared import declared
from flashattn.jit.compile import compile_spec
from flashattn.jit.resolve import Resolver
from flashattn.jit.spec import source_digest
from flashattn.jit.targets import SUPPORTED, target_of
from flashattn.settings import Settings
from flashattn.specs import specs_of
from flashattn.variants import MASKS

KERNELS = ROOT / "src" / "flashattn" / "kernels"


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


@pytest.mark.parametrize("mask", MASKS)
def test_an_assembler_that_can_choose_chooses_the_same_every_time(mask):
    """ptxas for Blackwell orders registers by address where a kernel leaves it a tie; the wheel's must leave none."""
    wanted = [v for v in declared("core", "sm_100") if (v.dtype, v.head_dim, v.mask) == ("bf16", 64, mask)]
    (spec,) = {spec for variant in wanted for spec in specs_of(variant, "sm_100") if spec.kernel == "attn_fwd"}
    assert len({compile_spec(spec, source_digest="0" * 64).code for _ in range(5)}) == 1
