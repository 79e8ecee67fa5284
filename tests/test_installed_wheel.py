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
    return {
        "PATH": str(folder / "no_programs"),
        "HOME": os.devnull,
        "FLASHATTN_DISABLE_JIT": "1",
        "FLASHATTN_ON_AOT_MISS": "error",
    }


def manifests(installed: Path) -> dict[str, dict]:
    paths = (installed / "flashattn" / "_aot").glob("*/MANIFEST.json")
    return {path.parent.name: json.loads(path.read_text()) for path in paths}


def test_installed_wheel_serves_every_declared_kernel_with_nothing_but_a_driver(installed, tmp_path):
    child = TESTS / "installed_wheel_child.py"
    out = run(sys.executable, "-I", child, TESTS, installed, cwd=tmp_path, env=bare_environment(tmp_path))
    report = json.loads(out.splitlines()[-1])
    assert report.keys() == manifests(installed).keys()
    for target, rows in report.items():
        assert {row["source"] for row in rows} == {"wheel"}, target
        assert not [row for row in rows if row["rejected"]], target
        # Both ways: nothing that is declared is missing, and nothing else was packed.
        assert {row["key"] for row in rows} == set(manifests(installed)[target]["entries"])


def test_a_kernel_that_the_wheel_lacks_is_an_error_there(installed, tmp_path):
    broken = tmp_path / "site"
    shutil.copytree(installed, broken)
    folder = next((broken / "flashattn" / "_aot").glob("sm_*"))
    manifest = json.loads((folder / "MANIFEST.json").read_text())
    entry = next(iter(manifest["entries"].values()))
    (folder / entry["code"]).unlink()
    done = subprocess.run(
        [sys.executable, "-I", TESTS / "installed_wheel_child.py", TESTS, broken],
        env=bare_environment(tmp_path),
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode != 0
    assert "KernelMissing" in done.stderr
    assert entry["label"].split("[")[0] in done.stderr


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
    """(offset, size) that follow from the types in an artifact's description."""
    sizes, end, found = {"i1": 1, "i8": 1, "i16": 2, "i32": 4, "i64": 8, "fp32": 4, "tensormap": 128}, 0, []
    for _, kind in params:
        size = 8 if kind.startswith("*") else sizes[kind]
        alignment = min(size, 64)
        start = -(-end // alignment) * alignment
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
