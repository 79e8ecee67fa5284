"""Keys are complete: what changes a binary changes its key or the digest of its sources, and nothing else does."""

from __future__ import annotations

import ast
import json
import os
import shutil
from dataclasses import fields, replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from flashattn import hopper, launch, settings, specs
from flashattn.jit.spec import KernelSpec, canonical_json, sha256, source_digest
from flashattn.jit.targets import SUPPORTED
from flashattn.variants import BwdVariant, FwdVariant

KERNELS = Path(specs.__file__).parent / "kernels"


# ---- A spec's key


def changes_of(value):
    """Values like `value` with one difference, at every depth."""
    if isinstance(value, tuple):
        yield value[:-1]
        for i, item in enumerate(value):
            yield from ((*value[:i], other, *value[i + 1 :]) for other in changes_of(item))
    else:
        yield not value if isinstance(value, bool) else value + ("x" if isinstance(value, str) else 1)


def a_spec(kind: type = KernelSpec) -> KernelSpec:
    facts = {"dtype": "bf16", "head_dim": 64, "head_dim_v": 64, "mask": "causal", "is_aligned": True}
    variant = FwdVariant(**facts, allow_tf32=False, has_tables=True)
    (spec,) = specs.specs_of(variant, "sm_90")
    return kind(**spec.to_json())


def not_in_the_key(spec: KernelSpec) -> set[str]:
    """Fields of which a change, or two different ones, give the same key."""
    found = set()
    for field in fields(spec):
        others = [replace(spec, **{field.name: value}) for value in changes_of(getattr(spec, field.name))]
        if len({spec.key, *(other.key for other in others)}) != 1 + len(others):
            found.add(field.name)
    return found


def test_every_part_of_every_field_of_a_spec_is_in_its_key():
    assert not_in_the_key(a_spec()) == set()


@pytest.mark.parametrize("name", [field.name for field in fields(KernelSpec)])
def test_a_field_that_is_left_out_of_the_key_is_told(name):
    class Forgetful(KernelSpec):
        def to_json(self):
            return {field: value for field, value in super().to_json().items() if field != name}

    whole = a_spec()
    assert not_in_the_key(Forgetful(**whole.to_json())) == {name}


def test_a_spec_that_was_written_and_read_has_the_same_key():
    spec = a_spec()
    read = KernelSpec.from_json(json.loads(canonical_json(spec.to_json())))
    assert read == spec
    assert read.key == spec.key


# ---- The digest of the sources


def edits(folder: Path):
    """(what, path, text): each function of each file with a statement more."""
    for path in sorted(folder.glob("*.py")):
        lines = path.read_text().splitlines()
        for function in ast.parse(path.read_text()).body:
            if isinstance(function, ast.FunctionDef):
                statement = f"{' ' * function.body[-1].col_offset}edited = 1"
                changed = [*lines[: function.end_lineno], statement, *lines[function.end_lineno :]]
                yield f"an edit of {function.name}", path, "\n".join(changed)


def _rename(folder: Path) -> Path:
    (folder / "flash_common.py").rename(folder / "flash_shared.py")
    return folder


def _move_one(folder: Path) -> Path:
    (folder / "deeper").mkdir()
    (folder / "flash_bwd.py").rename(folder / "deeper" / "flash_bwd.py")
    return folder


def _move_all(folder: Path) -> Path:
    return folder.rename(folder.with_name("elsewhere"))


def _touch(folder: Path) -> Path:
    for path in folder.glob("*.py"):
        os.utime(path, (1, 1))
    return folder


def _run(folder: Path) -> Path:
    (folder / "__pycache__").mkdir()
    (folder / "__pycache__" / "flash_fwd.py").write_text("left by a tool\n")
    (folder / "flash_fwd.cpython-311.pyc").write_bytes(b"compiled")
    return folder


HARMLESS = {"a rename": _rename, "a move": _move_one, "another path": _move_all, "a new time": _touch, "a run": _run}


def faults(digest, scratch: Path) -> set[str]:
    """What `digest` overlooks, and what it is misled by. `scratch` is a folder to work in."""
    found, expected = set(), digest(KERNELS)
    folder = scratch / "edited"
    shutil.copytree(KERNELS, folder, ignore=shutil.ignore_patterns("__pycache__"))
    for what, path, text in edits(folder):
        whole = path.read_text()
        path.write_text(text)
        found |= {f"{what} is overlooked"} if digest(folder) == expected else set()
        path.write_text(whole)
    for what, change in HARMLESS.items():
        folder = scratch / what / "kernels"
        # As a checkout is: with other times than the original's.
        shutil.copytree(KERNELS, folder, ignore=shutil.ignore_patterns("__pycache__"))
        before = digest(folder)
        found |= {f"{what} changes it"} if digest(change(folder)) != before else set()
    return found


def test_every_edit_of_a_kernel_or_its_helpers_changes_the_digest_and_nothing_else_does(tmp_path):
    names = {what.split()[-1] for what, _, _ in edits(KERNELS)}
    assert {"attn_fwd", "bwd_preprocess", "bwd_dkdv", "bwd_dq", "online_softmax", "load_rows"} <= names
    assert faults(source_digest, tmp_path) == set()


def _hash(folder: Path, part, pattern: str = "**/*.py") -> str:
    return sha256("\n".join(sorted(part(path) for path in folder.glob(pattern))).encode())


@pytest.mark.parametrize(
    ("digest", "told"),
    [
        (lambda folder: _hash(folder, Path.read_text, "flash_[fb]*.py"), "an edit of online_softmax is overlooked"),
        (lambda folder: _hash(folder, Path.read_text, "flash_[cf]*.py"), "an edit of bwd_dq is overlooked"),
        (lambda folder: _hash(folder, lambda path: path.name + path.read_text()), "a rename changes it"),
        (
            lambda folder: _hash(folder, lambda path: f"{path.relative_to(folder)}{path.read_text()}"),
            "a move changes it",
        ),
        (lambda folder: _hash(folder, lambda path: f"{path}{path.read_text()}"), "another path changes it"),
        (
            lambda folder: _hash(folder, lambda path: f"{path.stat().st_mtime}{path.read_text()}"),
            "a new time changes it",
        ),
        (lambda folder: _hash(folder, Path.read_text), "a run changes it"),
    ],
    ids=["no helpers", "no backward", "names", "places", "paths", "times", "what Python leaves"],
)
def test_a_digest_that_overlooks_or_is_misled_is_told(tmp_path, digest, told):
    assert told in faults(digest, tmp_path)


# ---- From the call to the specs

OTHER_VALUES = {
    "dtype": ("fp16",),
    "head_dim": (63, 128),
    "head_dim_v": (63, 128),
    "mask": ("causal", "window"),
    "is_aligned": (False,),
    "allow_tf32": (True,),
    "has_tables": (True,),
}
# Where one kernel serves both, a variant with tables is the one without.
ONE_KERNEL = {FwdVariant: {"has_tables"}, BwdVariant: set()}


def ignored(specs_of, family: type, target: str) -> set[str]:
    """Fields of a variant of which a change leaves every spec as it was."""
    found = set()
    for field in fields(family):
        for value in OTHER_VALUES[field.name]:
            dtype = "fp32" if field.name == "allow_tf32" else "bf16"
            facts = {"dtype": dtype, "head_dim": 64, "head_dim_v": 64, "mask": "full", "is_aligned": True}
            tables = {"has_tables": False} if family is FwdVariant else {}
            base = family(**facts, allow_tf32=False, **tables)
            before, after = (
                {spec.key for spec in specs_of(variant, target)}
                for variant in (base, replace(base, **{field.name: value}))
            )
            found |= {field.name} if before == after else set()
    return found


@pytest.mark.parametrize("family", [FwdVariant, BwdVariant])
@pytest.mark.parametrize("target", SUPPORTED)
def test_every_field_of_a_variant_changes_a_spec(family, target):
    expected = set() if target == "sm_90" else ONE_KERNEL[family]
    assert ignored(specs.specs_of, family, target) == expected


@pytest.mark.parametrize("name", OTHER_VALUES)
def test_a_field_that_no_spec_reads_is_told(name):
    def forgetful(variant, target):
        fixed = {"dtype": variant.dtype if variant.dtype == "fp32" else "bf16", "mask": "full", "is_aligned": True}
        value = {**fixed, "head_dim": 64, "head_dim_v": 64, "allow_tf32": False, "has_tables": False}[name]
        return specs.specs_of(replace(variant, **{name: value}), target)

    assert ignored(forgetful, FwdVariant, "sm_90") == {name}


FACTS = ("bwd", torch.bfloat16, 64, 64, "full", True)
# Of a forward, with or without tables.
FWD_FACTS = ("fwd", *FACTS[1:], False)
OTHER_FACTS = ("fwd", torch.float16, 128, 128, "causal", False, True)


def lost(plan) -> list[int]:
    """Places in the key of a call of which a change does not reach the variant."""
    base, _ = plan(FWD_FACTS, "sm_90")
    changed = [(*FWD_FACTS[:i], other, *FWD_FACTS[i + 1 :]) for i, other in enumerate(OTHER_FACTS) if i]
    changed.insert(0, FACTS)
    return [i for i, facts in enumerate(changed) if plan(facts, "sm_90")[0] == base]


def test_every_fact_in_the_key_of_a_call_reaches_the_variant():
    assert lost(launch.plan) == []


@pytest.mark.parametrize("place", range(1, len(FWD_FACTS)))
def test_a_fact_that_does_not_reach_the_variant_is_told(place):
    def forgetful(facts, target):
        if len(facts) <= place:
            return launch.plan(facts, target)
        return launch.plan((*facts[:place], FWD_FACTS[place], *facts[place + 1 :]), target)

    assert lost(forgetful) == [place]


def test_facts_and_device_are_the_whole_key_of_a_call(monkeypatch):
    """Every call looks up facts of the kinds above; each GPU has kernels of its own, for its own target."""
    seen, kernels = [], launch._kernels

    def on_a_gpu(facts, device):
        seen.append(facts)
        return kernels(facts, torch.device("cuda", 0))

    launch.reset()
    with monkeypatch.context() as patch:
        patch.setattr(launch, "interpreting", lambda: True)
        patch.setattr(launch, "_kernels", on_a_gpu)
        patch.setattr(launch, "_Compiled", _Nothing)
        patch.setattr(launch, "_resolver", SimpleNamespace(resolve_all=list))
        patch.setattr(hopper, "prepare", lambda *about: (1, lambda *addresses: addresses))
        patch.setattr(launch, "target_name", ("sm_90", "sm_80").__getitem__)
        q = torch.zeros(1, 3, 2, 64, dtype=torch.bfloat16, requires_grad=True)
        torch.ops.flashattn.attention(q, q, q)[0].sum().backward()
        found = [kernels(FACTS, torch.device("cuda", index)) for index in (0, 1)]
    launch.reset()
    assert [facts[0] for facts in seen] == ["fwd", "bwd"]
    for facts in seen:
        assert [type(fact) for fact in facts] == [type(fact) for fact in (FACTS if facts[0] == "bwd" else FWD_FACTS)]
    assert [{kernel.spec.target for kernel in each.values()} for each in found] == [{"sm_90"}, {"sm_80"}]


class _Nothing:
    """Stands in for a loaded kernel."""

    block_m = block_n = 16
    launch, waits = None, False

    def __init__(self, spec, artifact, index):
        self.spec, self.index, self.constants = spec, index, dict(spec.constants)

    def start(self, grid, arguments):
        pass

    def __call__(self, *args):
        pass


def test_the_setting_for_tf32_reaches_the_variant_of_float32_alone(monkeypatch):
    monkeypatch.setattr(settings, "_settings", settings.Settings(allow_tf32=True))
    assert launch.plan(("fwd", torch.float32, *FWD_FACTS[2:]), "sm_90")[0].allow_tf32
    assert not launch.plan(FACTS, "sm_90")[0].allow_tf32
