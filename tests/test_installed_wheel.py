"""The wheel as a user has it: installed, without Triton, a C compiler or a home to write to, compiling not allowed.

The core profile for one target is compiled, packed and installed here; `make wheel` sets WHEEL_UNDER_TEST to the wheel
with all of them. Drivers are stand-ins: that the kernels compute what they should is for the tests on a GPU.
"""

from __future__ import annotations

import json
import os
import shutil
import struct
import subprocess
import sys
from pathlib import Path

import pytest
from tiny_project import BUILD_FILES, ROOT

TESTS = Path(__file__).resolve().parent


def run(*command, **options) -> str:
    done = subprocess.run([*map(str, command)], capture_output=True, text=True, check=False, **options)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def build_wheel(folder: Path) -> Path:
    """A wheel with the core profile for sm_90. What .aot has already is not compiled again."""
    tree = folder / "tree"
    shutil.copytree(ROOT / "src", tree / "src", ignore=shutil.ignore_patterns("__pycache__", "_aot", "*.egg-info"))
    for name in (*BUILD_FILES, "README.md"):
        shutil.copy(ROOT / name, tree)
    run(sys.executable, "build_aot.py", "--targets", "sm_90", "--work", ROOT / ".aot", cwd=tree)
    hook = f"from setuptools import build_meta; build_meta.build_wheel({str(folder)!r})"
    run(sys.executable, "-c", hook, cwd=tree)
    return next(folder.glob("*.whl"))


@pytest.fixture(scope="module")
def installed(tmp_path_factory) -> Path:
    """Folder that the wheel is installed in."""
    folder = tmp_path_factory.mktemp("installed")
    wheel = os.environ.get("WHEEL_UNDER_TEST")
    wheel = Path(wheel).resolve() if wheel else build_wheel(folder)
    run(sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--target", folder / "site", wheel)
    return folder / "site"


def bare_environment(folder: Path) -> dict[str, str]:
    """No program can be found, HOME cannot be written (not even by root), compiling and fallbacks are off."""
    (folder / "no_programs").mkdir()
    (folder / "temporary").mkdir()
    return {
        "PATH": str(folder / "no_programs"),
        "HOME": os.devnull,
        # Else what a user's cache in /tmp happens to hold would stand in for the wheel.
        "TMPDIR": str(folder / "temporary"),
        "FLASHATTN_DISABLE_JIT": "1",
        "FLASHATTN_ON_AOT_MISS": "error",
    }


def manifests(installed: Path) -> dict[str, dict]:
    paths = (installed / "flashattn" / "_aot").glob("*/MANIFEST.json")
    return {path.parent.name: json.loads(path.read_text()) for path in paths}


def serve(installed: Path, folder: Path) -> subprocess.CompletedProcess:
    """Resolve, load and launch every declared kernel, in a process that has the installed wheel and little else."""
    return subprocess.run(
        [sys.executable, "-I", TESTS / "installed_wheel_child.py", TESTS, installed],
        cwd=folder,
        env=bare_environment(folder),
        capture_output=True,
        text=True,
        check=False,
    )


def faults(report: dict[str, list[dict]], installed: Path) -> list[str]:
    """What of the declared kernels did not come from the wheel, and what the wheel holds beside them."""
    found = []
    for target, manifest in manifests(installed).items():
        rows = {row["key"]: row for row in report[target]}
        found += [f"{target}: {row}" for row in rows.values() if row["source"] != "wheel" or row["rejected"]]
        found += [f"{target}: not packed: {key}" for key in rows.keys() - manifest["entries"].keys()]
        found += [f"{target}: not declared: {key}" for key in manifest["entries"].keys() - rows.keys()]
    return found


def test_installed_wheel_serves_every_declared_kernel_with_nothing_but_a_driver(installed, tmp_path):
    done = serve(installed, tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr
    report = json.loads(done.stdout.splitlines()[-1])
    assert report.keys() == manifests(installed).keys()
    assert all(report.values())
    assert faults(report, installed) == []


def _remove_the_code(folder: Path, manifest: dict, key: str) -> None:
    (folder / manifest["entries"][key]["code"]).unlink()


def _remove_the_entry(folder: Path, manifest: dict, key: str) -> None:
    del manifest["entries"][key]


def _damage_the_code(folder: Path, manifest: dict, key: str) -> None:
    path = folder / manifest["entries"][key]["code"]
    path.write_bytes(path.read_bytes()[:-1] + b"?")


def _edit_a_kernel(folder: Path, manifest: dict, key: str) -> None:
    with (folder.parents[1] / "kernels" / "flash_common.py").open("a") as file:
        file.write("edited = 1\n")


@pytest.mark.parametrize(
    ("plant", "reason"),
    [
        (_remove_the_code, "corrupt"),
        (_remove_the_entry, "not built"),
        (_damage_the_code, "corrupt"),
        (_edit_a_kernel, "source"),
    ],
)
def test_a_kernel_that_the_wheel_lacks_is_an_error_there(installed, tmp_path, plant, reason):
    broken = tmp_path / "site"
    shutil.copytree(installed, broken)
    folder = next((broken / "flashattn" / "_aot").glob("sm_*"))
    manifest = json.loads((folder / "MANIFEST.json").read_text())
    key, entry = next(iter(manifest["entries"].items()))
    plant(folder, manifest, key)
    (folder / "MANIFEST.json").write_text(json.dumps(manifest))
    done = serve(broken, tmp_path)
    assert done.returncode != 0
    assert "KernelMissing" in done.stderr
    assert f"({reason}: " in done.stderr
    # Without its sources no kernel of the wheel is used, and the first that is asked for is named.
    assert entry["label"].split("[")[0] in done.stderr or plant is _edit_a_kernel


def test_a_kernel_that_is_packed_and_not_declared_is_told(installed, tmp_path):
    site = tmp_path / "site"
    shutil.copytree(installed, site)
    folder = next((site / "flashattn" / "_aot").glob("sm_*"))
    manifest = json.loads((folder / "MANIFEST.json").read_text())
    manifest["entries"]["0" * 64] = next(iter(manifest["entries"].values()))
    (folder / "MANIFEST.json").write_text(json.dumps(manifest))
    done = serve(site, tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr
    report = json.loads(done.stdout.splitlines()[-1])
    assert faults(report, site) == [f"{folder.name}: not declared: {'0' * 64}"]


def sections(elf: bytes):
    """(name, content) of each section of a 64-bit ELF file."""
    (offset,) = struct.unpack_from("<Q", elf, 40)
    size, count, names = struct.unpack_from("<3H", elf, 58)
    headers = [struct.unpack_from("<II4QIIQQ", elf, offset + size * i) for i in range(count)]
    for name, _, _, _, start, length, *_ in headers:
        begin = headers[names][4] + name
        yield elf[begin : elf.index(b"\0", begin)].decode(), elf[start : start + length]


def parameters_of_the_binary(cubin: bytes, name: str) -> list[tuple[int, int]]:
    """(offset, size) of each parameter, which the assembler wrote down in .nv.info (attribute 0x17, KPARAM_INFO)."""
    content, at, found = dict(sections(cubin))[f".nv.info.{name}"], 0, {}
    while at < len(content):
        form, attribute, length = struct.unpack_from("<BBH", content, at)
        at += 4
        if (form, attribute) == (4, 0x17):
            _, ordinal, offset, flags = struct.unpack_from("<IHHI", content, at)
            found[ordinal] = (offset, flags >> 18)
        at += length if form == 4 else 0
    return [found[ordinal] for ordinal in sorted(found)]


def parameters_as_described(params: list) -> list[tuple[int, int]]:
    """(offset, size) that follow from the types in an artifact's description.

    A tensor map is aligned to 64 bytes of memory, and sm_90's parameters, where alone there are maps, begin at 0x210.
    """
    sizes, end, found = {"i1": 1, "i8": 1, "i16": 2, "i32": 4, "i64": 8, "fp32": 4, "tensormap": 128}, 0, []
    for _, kind in params:
        size = 8 if kind.startswith("*") else sizes[kind]
        alignment = min(size, 64)
        start = -(-(0x210 + end) // alignment) * alignment - 0x210
        found.append((start, size))
        end = start + size
    return found


def test_parameters_in_the_descriptions_are_those_of_the_binaries(installed):
    checked = 0
    for path in (installed / "flashattn" / "_aot").glob("sm_*/*.cubin"):
        meta = json.loads(path.with_suffix(".json").read_text())
        assert parameters_of_the_binary(path.read_bytes(), meta["name"]) == parameters_as_described(meta["params"])
        checked += 1
    assert checked
