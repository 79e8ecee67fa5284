"""The command: what it says, what it exits with, and that looking changes nothing."""

from __future__ import annotations

import ast
import json
import logging
import os
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest
import torch
from fake_driver_python import CudaStandIn
from stub_compiler import artifact_of, write_wheel

from flashattn import cli, cli_doctor, cli_sources, declared, settings, specs
from flashattn.cli_output import age_text, counted, parse_age, parse_size, size_text, table
from flashattn.cli_sources import KERNELS
from flashattn.jit import batch, driver, record
from flashattn.jit.spec import KernelSpec, source_digest
from flashattn.jit.store import UserStore
from flashattn.jit.targets import SUPPORTED
from flashattn.specs import declared_specs
from flashattn.variants import FwdVariant

DOCS = Path(__file__).resolve().parents[1] / "docs" / "jit-and-wheel.md"
DIGEST = source_digest(KERNELS)
EXPLAIN = ("explain", "--dtype", "bf16", "--head-dim", "128", "--target", "sm_90")
LOOKING = {
    "env": ("env",),
    "doctor": ("doctor", "--target", "sm_90"),
    "list": ("list",),
    "list one": ("list", "--target", "sm_90,sm_87"),
    "verify": ("verify",),
    "explain": EXPLAIN,
    "path": ("cache", "path"),
    "cache list": ("cache", "list"),
    "cache verify": ("cache", "verify"),
}


class Place:
    """A wheel and a cache below `root` that the command looks at, and what the command printed last."""

    def __init__(self, root: Path, monkeypatch, capsys):
        self.root, self.monkeypatch, self.capsys = root, monkeypatch, capsys
        self.aot, self.cache = root / "_aot", root / "cache"
        self.aot.mkdir()
        self.set(FLASHATTN_AOT_DIR=self.aot, FLASHATTN_CACHE_DIR=self.cache)

    def set(self, **variables) -> None:
        for name, value in variables.items():
            self.monkeypatch.setenv(name, str(value))

    def run(self, *argv) -> int:
        settings.reset()
        self.capsys.readouterr()
        try:
            status = cli.main([str(each) for each in argv])
        except SystemExit as left:
            status = left.code
        self.out, self.err = self.capsys.readouterr()
        return status

    def json(self, *argv, status: int = 0) -> dict:
        assert self.run(*argv, "--json") == status, self.out + self.err
        return json.loads(self.out)

    def fill_wheel(self, target: str = "sm_90", drop: int = 0, digest: str = DIGEST) -> Path:
        found = list(declared_specs("core", target).values())
        return write_wheel(self.aot, found[drop:], digest)

    def fill_cache(self, *wanted: KernelSpec) -> None:
        store = UserStore(self.cache)
        for spec in wanted:
            assert store.publish(artifact_of(spec, DIGEST))

    def damage(self, folder: Path, every: bool = False) -> None:
        """Change one byte of the first kernel below `folder`, or of every one."""
        codes = sorted(folder.rglob("*.cubin"))
        for code in codes if every else codes[:1]:
            content = bytearray(code.read_bytes())
            content[7] ^= 1
            code.write_bytes(content)

    def tree(self) -> dict:
        """Contents and times of all files and folders; the time of an entry's folder is when it was last used."""
        # That the cache can be written is tried with a file that is gone at once.
        paths = [path for path in self.root.rglob("*") if path != self.cache]
        return {path: (path.stat().st_mtime_ns, path.is_file() and path.read_bytes()) for path in paths}

    def gpu(self, capability: int) -> CudaStandIn:
        stand_in = CudaStandIn()
        stand_in.set("devices", 1)
        stand_in.capability[0] = capability
        driver.use_library(stand_in.library)
        self.monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
        return stand_in


@pytest.fixture
def place(tmp_path, monkeypatch, capsys):
    for name in list(os.environ):
        if name.startswith(("FLASHATTN_", "TRITON_")):
            monkeypatch.delenv(name)
    (tmp_path / "tmp").mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "tmp"))
    logger = logging.getLogger("flashattn")
    before = logger.level, list(logger.handlers)
    for backend in ("cuda", "hip"):
        driver.use_library(tmp_path / "no_driver.so", backend)
    yield Place(tmp_path, monkeypatch, capsys)
    for backend in ("cuda", "hip"):
        driver.use_library(None, backend)
    logger.setLevel(before[0])
    logger.handlers[:] = before[1]
    settings.reset()


@pytest.fixture
def stubbed(monkeypatch):
    """The compiler that warmup's processes call makes a few bytes at once."""
    monkeypatch.setattr(batch, "compile_spec", lambda spec, source_digest: artifact_of(spec, source_digest))


def specs_for(target: str = "sm_90", head_dim: int = 16, **changes) -> list[KernelSpec]:
    facts = {"dtype": "bf16", "head_dim": head_dim, "head_dim_v": head_dim, "mask": "full", "is_aligned": True}
    return list(specs.specs_of(FwdVariant(**{**facts, "allow_tf32": False, "has_tables": False, **changes}), target))


def core(target: str = "sm_90", **wanted) -> list[KernelSpec]:
    """The kernels of those declared variants that have the fields `wanted`."""
    found = declared.declared("core", target)
    chosen = [each for each in found if all(getattr(each, name) == value for name, value in wanted.items())]
    return list(dict.fromkeys(spec for variant in chosen for spec in specs.specs_of(variant, target)))


def recorded(path: Path, *wanted: KernelSpec) -> Path:
    for spec in wanted:
        record.append(path, spec)
    return path


# ---- All commands


@pytest.mark.parametrize("argv", LOOKING.values(), ids=LOOKING)
def test_looking_changes_no_file_even_where_everything_is_damaged(place, argv):
    place.damage(place.fill_wheel(), every=True)
    place.fill_wheel("gfx942")
    (place.aot / "gfx942" / "MANIFEST.json").write_bytes(b"\xff{")
    place.fill_cache(*core(dtype="bf16", head_dim=128), *specs_for(), *specs_for(head_dim=32))
    place.damage(place.cache, every=True)
    place.set(FLASHATTN_RECORD=place.root / "record")
    long_ago = 1_000_000_000
    for entry in UserStore(place.cache).entries():
        os.utime(entry.folder, (long_ago, long_ago))
    before = place.tree()
    assert place.run(*argv) in (0, 1)
    assert place.tree() == before


@pytest.mark.parametrize("argv", LOOKING.values(), ids=LOOKING)
def test_json_is_one_object_and_the_table_is_not_json(place, argv):
    place.fill_wheel()
    assert place.json(*argv)["problems"] == []
    assert place.run(*argv) == 0
    with pytest.raises(ValueError):
        json.loads(place.out)


@pytest.mark.parametrize("argv", LOOKING.values(), ids=LOOKING)
def test_a_wrong_setting_is_told_and_nothing_is_raised(place, argv):
    place.set(FLASHATTN_FORCE_JIT="perhaps")
    assert place.run(*argv) == (1 if argv[0] in ("env", "doctor") else 2)
    assert "FLASHATTN_FORCE_JIT is 'perhaps': it takes 0, 1, true or false" in place.out + place.err


@pytest.mark.parametrize(
    "argv",
    [(), ("cache",), ("warmup",), ("cache", "gc"), ("explain",), ("warmup", "FILE", "--profile", "core")],
    ids=str,
)
def test_usage_errors_exit_with_2(place, argv):
    assert place.run(*argv) == 2
    assert place.err


def test_an_unknown_target_exits_with_2_and_lists_the_supported(place):
    assert place.run("list", "--target", "sm_70") == 2
    assert all(name in place.err for name in ("sm_70", *SUPPORTED, "sm_87"))


def test_without_a_gpu_a_target_must_be_named(place):
    assert place.run(*EXPLAIN[:-2]) == 2
    assert "no GPU was found here, so say for which: --target sm_90" in place.err


def test_the_command_runs_as_a_module():
    environ = {"PYTHONPATH": str(KERNELS.parents[1]), "PATH": "/usr/bin"}
    command = [sys.executable, "-m", "flashattn"]
    done = subprocess.run([*command, "--version"], capture_output=True, text=True, check=True, env=environ)
    assert done.stdout.startswith("flashattn ")
    assert subprocess.run(command, capture_output=True, check=False, env=environ).returncode == 2


def test_no_part_of_the_package_imports_the_command():
    for path in KERNELS.parent.rglob("*.py"):
        if path.name.startswith("cli") or path.name == "__main__.py":
            continue
        for node in ast.walk(ast.parse(path.read_text())):
            names = [node.module or ""] if isinstance(node, ast.ImportFrom) else []
            names += [alias.name for alias in node.names] if isinstance(node, (ast.Import, ast.ImportFrom)) else []
            assert not [name for name in names if name.split(".")[-1].startswith("cli")], path


def test_the_docs_name_every_command():
    text = DOCS.read_text()
    for argv in (*LOOKING.values(), ("cache", "clear"), ("cache", "gc"), ("warmup",)):
        words = [word for word in argv[:2] if not word.startswith("-")]
        assert f"flashattn {' '.join(words)}" in text, words


# ---- env, doctor


def test_env_shows_versions_gpus_what_is_set_and_paths(place):
    place.gpu(90)
    place.set(FLASHATTN_KEEP_IR=place.root / "ir")
    found = place.json("env")
    assert found["versions"]["torch"].startswith(torch.__version__)
    assert [gpu["target"] for gpu in found["gpus"]] == ["sm_90"]
    assert found["variables"]["FLASHATTN_KEEP_IR"] == str(place.root / "ir")
    assert found["settings"]["FLASHATTN_ON_AOT_MISS"] == "warn"
    assert (found["paths"]["wheel"], found["paths"]["cache"]) == (str(place.aot), str(place.cache))
    place.run("env")
    assert all(word in place.out for word in ("sm_90", "FLASHATTN_KEEP_IR", str(place.cache), DIGEST[:12]))


def levels(found: dict) -> dict[str, str]:
    return {check["name"]: check["level"] for check in found["checks"]}


def said(found: dict, name: str) -> str:
    return " ".join(check["text"] for check in found["checks"] if check["name"] == name)


def test_doctor_finds_a_sound_machine_sound(place):
    place.gpu(90)
    place.fill_wheel()
    assert set(levels(place.json("doctor")).values()) == {"ok"}


def test_doctor_without_a_gpu_says_so_and_finds_no_problem(place):
    found = place.json("doctor")
    assert levels(found)["driver"] == "note"
    assert "no GPU driver" in said(found, "driver")


def test_doctor_says_that_a_gpu_is_jit_only(place):
    place.gpu(87)
    found = place.json("doctor")
    assert levels(found)["sm_87"] == "note"
    assert said(found, "sm_87").startswith("JIT only: no wheel holds kernels for sm_87")


@pytest.mark.parametrize(
    ("breakage", "name", "text"),
    [
        ("gpu too old", "cuda:0", "target 'sm_75' is not supported"),
        ("driver refuses", "driver", "CUDA_ERROR_NO_DEVICE (100)"),
        ("torch without a GPU", "torch", "install a torch that is built for it"),
        ("damaged kernel", "sm_90", "of 120 kernels of the core profile 119 are in the wheel and 0 in the cache"),
        ("damaged manifest", "sm_90", "corrupt: its MANIFEST.json cannot be understood"),
        ("other sources", "sm_90", "source: it was compiled from other sources of the kernels"),
        ("no wheel, no Triton", "JIT", "Triton is not installed: a kernel that the wheel lacks cannot be compiled"),
        ("cache of everybody", "cache", "others may write to"),
        ("cache in a file", "cache", "cannot be made"),
        ("contradiction", "settings", "FLASHATTN_FORCE_JIT and FLASHATTN_DISABLE_JIT are both on"),
        ("unknown variable", "settings", "FLASHATTN_CACHE is set and is no variable of flashattn: did you mean"),
        ("tiles that are none", "settings", "FLASHATTN_TILES="),
    ],
)
def test_doctor_names_a_problem_and_exits_with_1(place, breakage, name, text):
    stand_in = place.gpu(75 if breakage == "gpu too old" else 90)
    wheel = place.fill_wheel(digest="0" * 64 if breakage == "other sources" else DIGEST)
    if breakage == "driver refuses":
        stand_in.fail("cuInit", 100, times=100)
    elif breakage == "torch without a GPU":
        place.monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    elif breakage == "damaged kernel":
        place.damage(wheel)
    elif breakage == "damaged manifest":
        (wheel / "MANIFEST.json").write_text("{")
    elif breakage == "no wheel, no Triton":
        place.set(FLASHATTN_AOT_DIR=place.root / "nowhere")
        place.monkeypatch.setattr(cli_doctor, "has_triton", lambda: False)
    elif breakage == "cache of everybody":
        place.cache.mkdir()
        place.cache.chmod(0o777)
    elif breakage == "cache in a file":
        place.set(FLASHATTN_CACHE_DIR=Path(__file__) / "cache")
    elif breakage == "contradiction":
        place.set(FLASHATTN_FORCE_JIT=1, FLASHATTN_DISABLE_JIT=1)
    elif breakage == "unknown variable":
        place.set(FLASHATTN_CACHE="here")
    elif breakage == "tiles that are none":
        place.set(FLASHATTN_TILES=Path(__file__))
    found = place.json("doctor", status=1)
    assert text in said(found, name)
    assert [problem.split(":")[0] for problem in found["problems"]] == [name.split(":")[0]]
    assert place.run("doctor") == 1
    assert "1 problem" in place.out


def test_doctor_judges_an_image_in_which_compiling_is_off(place):
    place.fill_wheel(drop=2)
    place.set(FLASHATTN_DISABLE_JIT=1)
    text = said(place.json("doctor", "--target", "sm_90", status=1), "sm_90")
    assert "118 are in the wheel and 0 in the cache; the others raise KernelMissing" in text
    place.fill_cache(*core("sm_80"))
    found = place.json("doctor", "--target", "sm_80")
    assert "0 are in the wheel and 100 in the cache" in said(found, "sm_80")


def test_doctor_does_not_take_force_jit_for_damage(place):
    place.fill_wheel()
    place.set(FLASHATTN_FORCE_JIT=1)
    assert levels(place.json("doctor", "--target", "sm_90"))["sm_90"] == "ok"


def test_doctor_does_not_miss_triton_where_the_wheel_has_everything(place):
    place.gpu(90)
    place.fill_wheel()
    place.monkeypatch.setattr(cli_doctor, "has_triton", lambda: False)
    assert levels(place.json("doctor"))["JIT"] == "note"


# ---- list, verify


def test_list_counts_where_the_declared_kernels_are(place):
    wheel = place.fill_wheel()
    place.damage(wheel)
    place.fill_cache(*core("sm_80", dtype="fp16", head_dim=64, mask="causal"))
    targets = place.json("list")["targets"]
    assert list(targets) == list(SUPPORTED)
    sources = {name: [kernel["source"] for kernel in targets[name]["kernels"]] for name in targets}
    assert (sources["sm_90"].count("wheel"), sources["sm_90"].count("compiled")) == (119, 1)
    assert (sources["sm_80"].count("user cache"), sources["sm_80"].count("compiled")) == (4, 96)
    place.run("list")
    row = next(line.split() for line in place.out.splitlines() if line.startswith("sm_90"))
    assert row[:7] == ["sm_90", "90", "120", "119", "0", "1", "0"]


def test_list_of_one_target_has_a_row_for_each_variant(place):
    place.fill_wheel()
    assert place.run("list", "--target", "sm_90") == 0
    for variant in declared.declared("core", "sm_90"):
        row = next(line for line in place.out.splitlines() if str(variant) in line)
        assert row.endswith("wheel")


def test_verify_finds_a_sound_wheel_and_cache_sound(place):
    place.fill_wheel()
    place.fill_cache(*specs_for())
    assert place.run("verify") == 0
    assert "Every kernel is as it was compiled." in place.out
    assert [each["kernels"] for each in place.json("verify")["places"]] == [120, 1]


@pytest.mark.parametrize(
    ("fault", "text"),
    [
        ("wheel byte", "corrupt: "),
        ("wheel file gone", "is missing"),
        ("wheel manifest", "corrupt: its MANIFEST.json cannot be understood"),
        ("wheel stray file", "MANIFEST.json does not name the file stray"),
        ("wheel stray beside", "no folder of a target"),
        ("wheel incomplete", "not built: profile core declares it"),
        ("wheel of other sources", "it was compiled from other sources of the kernels"),
        ("cache byte", "corrupt: its machine code does not have the size and digest"),
        ("cache file gone", "entry.json is missing"),
        ("no such folder", "is not a folder"),
    ],
)
def test_verify_names_what_is_wrong_and_exits_with_1(place, fault, text):
    wheel = place.fill_wheel(drop=fault == "wheel incomplete", digest="0" * 64 if "sources" in fault else DIGEST)
    place.fill_cache(*specs_for())
    if fault.endswith("byte"):
        place.damage(wheel if fault.startswith("wheel") else place.cache)
    elif fault.endswith("file gone"):
        next(wheel.glob("*.cubin") if fault.startswith("wheel") else place.cache.rglob("entry.json")).unlink()
    elif fault == "wheel manifest":
        (wheel / "MANIFEST.json").write_bytes(b"\0")
    elif fault == "wheel stray file":
        (wheel / "stray").touch()
    elif fault == "wheel stray beside":
        (place.aot / "stray").touch()
    elif fault == "no such folder":
        place.set(FLASHATTN_AOT_DIR=place.root / "nowhere")
    problems = place.json("verify", status=1)["problems"]
    assert len(problems) == 1 and text in problems[0], problems
    assert place.run("verify") == 1
    assert f"problem: {problems[0]}" in place.out


# ---- explain


def explained(place, *argv, status: int = 0) -> dict[str, dict]:
    found = place.json(*argv, status=status)
    return {kernel["kernel"]: kernel for variant in found["variants"] for kernel in variant["kernels"]}


def test_explain_says_where_each_kernel_would_come_from_and_compiles_nothing(place):
    place.monkeypatch.setattr("flashattn.jit.compile.compile_spec", lambda *a, **k: pytest.fail("compiled"))
    found = explained(place, *EXPLAIN)
    assert {kernel["source"] for kernel in found.values()} == {"compiled"}
    assert [each["reason"] for each in found["hopper_attn_fwd"]["rejected"]] == ["not built", "absent"]
    place.fill_cache(*core(dtype="bf16", head_dim=128, mask="full"))
    assert {kernel["source"] for kernel in explained(place, *EXPLAIN).values()} == {"user cache"}
    place.fill_wheel()
    found = explained(place, *EXPLAIN)
    assert {kernel["source"] for kernel in found.values()} == {"wheel"}
    assert list(found) == ["hopper_attn_fwd", "bwd_preprocess", "bwd_dkdv", "bwd_dq"]
    assert {kernel["spec_key"] for kernel in found.values()} == {
        spec.key for spec in core(dtype="bf16", head_dim=128, mask="full") if spec.kernel != "attn_fwd"
    }


def test_explain_says_why_a_hopper_gpu_gets_the_portable_forward(place):
    reasons = {
        (): None,
        ("--causal",): None,
        ("--window",): "no bound on how far a query sees back",
        ("--tables",): "no packed or padded sequences",
        ("--generic",): "multiples of 16 bytes",
        ("--head-dim-v", "64"): "takes head_dim 64, 96, 128, 192, 256, 192/128",
        ("--dtype", "fp32"): "takes bf16 and fp16",
        ("--target", "sm_80"): None,
    }
    for options, reason in reasons.items():
        found = place.json(*EXPLAIN, *options)["variants"][0]
        portable = found["kernels"][0]["kernel"] == "attn_fwd"
        assert portable == (reason is not None or "sm_80" in options), options
        assert (found["portable_because"] or "").endswith(reason or ""), found
        assert place.run(*EXPLAIN, *options) == 0
        assert (f"(portable: {found['portable_because']})" in place.out) == (reason is not None)


def test_explain_shows_label_tile_and_reasons_to_people(place):
    place.fill_wheel()
    assert place.run(*EXPLAIN, "--causal", "--generic", "--head-dim-v", "64") == 0
    assert "fwd bf16 d128 dv64 causal generic on sm_90" in place.out
    (spec,) = specs_for(head_dim=128, head_dim_v=64, mask="causal", is_aligned=False)
    constants, options = dict(spec.constants), dict(spec.options)
    assert spec.label() in place.out
    assert f"{constants['BLOCK_M']} x {constants['BLOCK_N']}, {options['num_warps']} warps" in place.out
    assert "not from the wheel: not declared: " in place.out
    assert "would be compiled on first call" in place.out


@pytest.mark.parametrize(
    ("variable", "value", "text"),
    [
        ("FLASHATTN_DISABLE_JIT", "1", "FLASHATTN_DISABLE_JIT is on"),
        ("FLASHATTN_ON_AOT_MISS", "error", "FLASHATTN_ON_AOT_MISS is error"),
        ("", "", "Triton is not installed"),
    ],
)
def test_explain_exits_with_1_where_a_call_would_raise(place, variable, value, text):
    if variable:
        place.set(**{variable: value})
    else:
        place.monkeypatch.setattr(cli_sources, "has_triton", lambda: False)
    found = explained(place, *EXPLAIN, status=1)
    assert {kernel["source"] for kernel in found.values()} == {"missing"}
    assert place.run(*EXPLAIN) == 1
    assert f"not found, and not compiled since {text}: a call raises KernelMissing" in place.out


def test_explain_heeds_force_jit(place):
    place.fill_wheel()
    place.set(FLASHATTN_FORCE_JIT=1)
    found = explained(place, *EXPLAIN)
    assert {kernel["source"] for kernel in found.values()} == {"compiled"}
    assert [each["reason"] for each in found["hopper_attn_fwd"]["rejected"]] == ["forced", "forced"]


# ---- cache


def test_cache_path_prints_the_folder_alone(place):
    assert place.run("cache", "path") == 0
    assert (place.out, place.err) == (f"{place.cache}\n", "")
    assert not place.cache.exists()


def test_cache_list_tells_what_a_call_would_use(place):
    current, old, broken = specs_for()[0], specs_for(head_dim=32)[0], specs_for(head_dim=64)[0]
    place.fill_cache(broken)
    place.damage(place.cache)
    place.fill_cache(current)
    UserStore(place.cache).publish(artifact_of(old, "0" * 64))
    entries = place.json("cache", "list", status=1)["entries"]
    assert sorted(each["state"] for each in entries) == ["corrupt", "other sources", "usable"]
    assert place.run("cache", "list") == 1
    assert "3 entries" in place.out
    assert "usable" in next(line for line in place.out.splitlines() if "HEAD_DIM=16 " in line)


def test_cache_verify_exits_with_1_for_a_damaged_entry(place):
    place.fill_cache(*specs_for(), *specs_for(head_dim=32))
    assert place.run("cache", "verify") == 0
    place.damage(place.cache)
    assert place.run("cache", "verify") == 1
    assert "2 entries looked at, 1 problem" in place.out


def test_cache_clear_empties_it(place):
    place.fill_cache(*specs_for(), *specs_for(head_dim=32))
    assert place.json("cache", "clear")["removed"] == 2
    assert not list(UserStore(place.cache).entries())


def test_cache_gc_removes_by_age_and_by_size(place):
    place.fill_cache(*specs_for(), *specs_for(head_dim=32), *specs_for(head_dim=64))
    old, *_ = entries = list(UserStore(place.cache).entries())
    os.utime(old.folder, (1_000_000_000, 1_000_000_000))
    assert place.json("cache", "gc", "--max-age", "30d")["removed"] == [old.key]
    assert place.run("cache", "gc", "--max-size", max(entry.bytes for entry in entries)) == 0
    assert len(list(UserStore(place.cache).entries())) == 1
    assert "1 entry, " in place.out


def test_a_cache_that_is_not_trusted_is_a_problem(place):
    place.cache.mkdir()
    place.cache.chmod(0o777)
    assert place.run("cache", "path") == 1
    assert "others may write to" in place.err


# ---- warmup


def test_warmup_compiles_what_a_file_names_and_calls_find_it(place):
    wanted = [*specs_for(), *specs_for("gfx942", mask="causal")]
    path = recorded(place.root / "record", *wanted, wanted[0])
    assert place.run("warmup", path, "--jobs", "2") == 0
    assert "2 kernels: 0 in the wheel, 0 in the cache, 2 to compile" in place.out
    assert "[2/2]" in place.out
    probe = cli_sources.Probe(settings.get())
    assert [probe.find(spec).source for spec in wanted] == ["user cache"] * 2
    assert place.json("warmup", path)["in_cache"] == 2
    assert len(record.read(path)) == 2


def test_warmup_of_a_profile_compiles_only_what_the_wheel_lacks(place, stubbed):
    place.fill_wheel(drop=3)
    place.set(FLASHATTN_ON_AOT_MISS="error")
    found = place.json("warmup", "--profile", "core", "--target", "sm_90", "--jobs", "2")
    assert (found["in_wheel"], found["compiled"], found["failed"]) == (117, 3, 0)
    assert {entry.key for entry in UserStore(place.cache).entries()} == {
        artifact_of(spec, DIGEST).key for spec in list(declared_specs("core", "sm_90").values())[:3]
    }


def test_warmup_of_a_file_can_be_limited_to_a_target(place, stubbed):
    path = recorded(place.root / "record", *specs_for(), *specs_for("gfx942"))
    assert place.json("warmup", path, "--target", "gfx942")["kernels"] == 1


def test_warmup_names_the_kernel_that_failed_and_keeps_the_others(place):
    (bad,) = specs_for(head_dim=32)
    bad = KernelSpec.from_json({**bad.to_json(), "signature": bad.signature[1:]})
    path = recorded(place.root / "record", bad, *specs_for())
    found = place.json("warmup", path, status=1)
    assert (found["compiled"], found["failed"]) == (1, 1)
    assert found["problems"][0].startswith(bad.label())
    assert [path.name for path in Path(found["logs"]).iterdir()] == [f"{bad.key}.log"]


def test_warmup_survives_a_compiler_that_aborts(place, monkeypatch):
    (bad,), good = specs_for(head_dim=32), specs_for()

    def compile_spec(spec, source_digest):
        return os.abort() if spec.key == bad.key else artifact_of(spec, source_digest)

    monkeypatch.setattr(batch, "compile_spec", compile_spec)
    found = place.json("warmup", recorded(place.root / "record", bad, *good), "--jobs", "1", status=1)
    assert (found["compiled"], found["failed"]) == (1, 1)
    assert found["problems"][0] == f"{bad.label()}: the compiler ended its process (SIGABRT)"


def test_warmup_replaces_entries_where_force_jit_is_on(place, stubbed):
    place.fill_cache(*specs_for())
    place.set(FLASHATTN_FORCE_JIT=1)
    assert place.json("warmup", recorded(place.root / "record", *specs_for()))["compiled"] == 1


def test_warmup_does_not_compile_for_a_cache_that_cannot_keep_it(place):
    place.cache.mkdir()
    place.cache.chmod(0o777)
    assert place.run("warmup", "--profile", "core", "--target", "sm_90") == 1
    assert "what is compiled could not be kept: others may write to" in place.out.replace(str(place.cache), "")


@pytest.mark.parametrize(
    ("content", "text"),
    [
        (None, "cannot be read (No such file or directory)"),
        ("no JSON\n", "line 1 does not hold a kernel's spec"),
        (
            json.dumps({"spec": {**specs_for()[0].to_json(), "module": "antigravity"}}),
            "names 'antigravity', which is no module of flashattn's kernels",
        ),
    ],
    ids=["no file", "no JSON", "another module"],
)
def test_warmup_refuses_a_file_that_is_none(place, content, text):
    path = place.root / "record"
    if content is not None:
        path.write_text(content)
    assert place.run("warmup", path) == 2
    assert text in place.err


def test_warmup_refuses_where_compiling_is_forbidden(place):
    place.set(FLASHATTN_DISABLE_JIT=1)
    assert place.run("warmup", "--profile", "core", "--target", "sm_90") == 2
    assert "FLASHATTN_DISABLE_JIT forbids it" in place.err


# ---- What people read


def test_tables_align_words_left_and_numbers_right():
    assert table(("name", "count"), [("a", 5), ("longer", 12)]) == "name    count\na           5\nlonger     12"
    assert (counted(1, "entry"), counted(2, "entry"), counted(0, "kernel")) == ("1 entry", "2 entries", "0 kernels")


def test_sizes_and_ages_are_read_and_shown():
    assert [parse_size(text) for text in ("1000", "500MB", "2 GiB", "1.5kB")] == [1000, 5 * 10**8, 2**31, 1500]
    assert [parse_age(text) for text in ("90s", "2h", "30d")] == [90.0, 7200.0, 2592000.0]
    assert [size_text(number) for number in (999, 31752, 2_900_000)] == ["999 B", "31.8 kB", "2.9 MB"]
    assert [age_text(seconds) for seconds in (-1, 59, 7200, 864000)] == ["0 s", "59 s", "2 h", "10 d"]
    for parse, text in ((parse_size, "many"), (parse_age, "30"), (parse_size, "-1"), (parse_age, "d")):
        with pytest.raises(ValueError, match="it takes a number"):
            parse(text)
