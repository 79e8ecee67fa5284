"""What a wheel of flashattn holds, shown on a project of one small kernel with the real build files."""

from __future__ import annotations

import json
import shutil
import tarfile
import zipfile
from pathlib import Path

import pytest
from tiny_project import ROOT, TinyProject

_HOOK = """
import os, sys
from setuptools import build_meta
os.umask(int(sys.argv[3], 8))
getattr(build_meta, sys.argv[1])(sys.argv[2])
"""


@pytest.fixture(scope="module")
def compiled(tmp_path_factory) -> TinyProject:
    """A tree with kernels for two targets in _aot; tests copy it."""
    project = TinyProject(tmp_path_factory.mktemp("compiled") / "tree")
    done = project.build(targets="sm_90,gfx942")
    assert done.returncode == 0, done.stdout + done.stderr
    shutil.rmtree(project.root / ".aot")
    return project


@pytest.fixture
def project(compiled, tmp_path) -> TinyProject:
    return copy_of(compiled, tmp_path / "tree")


def copy_of(project: TinyProject, root: Path) -> TinyProject:
    shutil.copytree(project.root, root)
    copied = object.__new__(TinyProject)
    copied.root, copied.package = root, root / "src" / "flashattn"
    copied.aot = copied.package / "_aot"
    return copied


def hook(project: TinyProject, name: str, out: Path, umask: str = "022", **environ: str):
    """Call a hook of the build backend in the tree, as pip does."""
    return project.run("-c", _HOOK, name, out, umask, **environ)


def build(project: TinyProject, out: Path, name: str = "build_wheel", umask: str = "022", **environ: str) -> Path:
    """The wheel or source distribution of the tree."""
    out.mkdir()
    done = hook(project, name, out, umask, **environ)
    assert done.returncode == 0, done.stdout + done.stderr
    return next(out.iterdir())


def refusal(project: TinyProject, out: Path, name: str = "build_wheel") -> str:
    """What building a wheel or source distribution says when it fails."""
    done = hook(project, name, out)
    assert done.returncode != 0, done.stdout
    assert not list(out.glob("*.whl")) + list(out.glob("*.gz"))
    return done.stderr


def kernels_in(wheel: Path) -> set[str]:
    return {name for name in zipfile.ZipFile(wheel).namelist() if "_aot/" in name}


def test_wheel_serves_every_python_and_platform(project, tmp_path):
    wheel = build(project, tmp_path / "out")
    assert wheel.name.endswith("-py3-none-any.whl")
    with zipfile.ZipFile(wheel) as archive:
        info = next(name for name in archive.namelist() if name.endswith(".dist-info/METADATA"))
        metadata = archive.read(info).decode()
        entry_points = archive.read(info.replace("METADATA", "entry_points.txt")).decode()
    assert entry_points.split() == ["[console_scripts]", "flashattn", "=", "flashattn.cli:main"]
    assert "Requires-Python: >=3.10" in metadata
    for requirement in ("torch>=2.10", 'triton>=3.6; sys_platform == "linux"', "filelock"):
        assert f"Requires-Dist: {requirement}\n" in metadata


def test_wheel_holds_exactly_what_the_manifests_name(project, tmp_path):
    expected = set()
    for manifest in project.aot.glob("*/MANIFEST.json"):
        folder = f"flashattn/_aot/{manifest.parent.name}"
        expected.add(f"{folder}/MANIFEST.json")
        for entry in json.loads(manifest.read_text())["entries"].values():
            expected |= {f"{folder}/{entry['code']}", f"{folder}/{entry['artifact_key']}.json"}
    assert len(expected) == 2 * (1 + 2 * 2)
    assert kernels_in(build(project, tmp_path / "out")) == expected


def test_wheel_holds_every_module(tmp_path):
    project = TinyProject(tmp_path / "tree")
    shutil.rmtree(project.package)
    shutil.copytree(ROOT / "src" / "flashattn", project.package, ignore=shutil.ignore_patterns("__pycache__", "_aot"))
    wheel = build(project, tmp_path / "out")
    modules = {path.relative_to(project.root / "src").as_posix() for path in project.package.rglob("*.py")}
    packed = {name for name in zipfile.ZipFile(wheel).namelist() if name.endswith(".py")}
    assert packed == modules


def test_two_builds_give_equal_bytes_whatever_the_umask_and_the_times(compiled, tmp_path):
    one, other = copy_of(compiled, tmp_path / "one"), copy_of(compiled, tmp_path / "other")
    for path in other.root.rglob("*"):
        if path.is_file():
            path.chmod(0o600)
            path.touch()
    first = build(one, tmp_path / "first")
    second = build(other, tmp_path / "second", umask="077")
    assert first.read_bytes() == second.read_bytes()


def test_wheel_from_the_source_distribution_equals_wheel_from_the_tree(project, tmp_path):
    from_tree = build(project, tmp_path / "from_tree")
    with tarfile.open(build(project, tmp_path / "sdist", "build_sdist")) as archive:
        archive.extractall(tmp_path / "unpacked")
    unpacked = object.__new__(TinyProject)
    unpacked.root = next((tmp_path / "unpacked").iterdir())
    from_sdist = build(unpacked, tmp_path / "from_sdist")
    assert kernels_in(from_sdist)
    assert from_sdist.read_bytes() == from_tree.read_bytes()


@pytest.mark.parametrize("name", ["build_wheel", "build_sdist"])
@pytest.mark.parametrize(
    ("stray", "said"),
    [
        ("sm_90/left_over.cubin", "sm_90: MANIFEST.json does not name the file left_over.cubin"),
        ("sm_90/deeper/left_over.cubin", "no MANIFEST.json is beside sm_90/deeper/left_over.cubin"),
        ("sm_80/left_over.cubin", "no MANIFEST.json is beside sm_80/left_over.cubin"),
        (".hidden", "no MANIFEST.json is beside .hidden"),
    ],
)
def test_a_stray_file_among_the_kernels_fails_the_build_by_name(project, tmp_path, stray, said, name):
    path = project.aot / stray
    path.parent.mkdir(exist_ok=True)
    path.write_bytes(b"left over")
    assert said in refusal(project, tmp_path, name)


def test_a_stale_build_folder_is_not_packed(project, tmp_path):
    stale = project.root / "build" / "lib" / "flashattn" / "_aot" / "sm_90" / "deleted.cubin"
    stale.parent.mkdir(parents=True)
    stale.write_bytes(b"deleted long ago")
    (project.root / "build" / "lib" / "flashattn" / "deleted.py").write_text("")
    names = zipfile.ZipFile(build(project, tmp_path / "out")).namelist()
    assert not [name for name in names if "deleted" in name]


def test_kernels_of_other_sources_fail_the_build_and_it_says_what_to_do(project, tmp_path):
    source = project.package / "kernels" / "scale.py"
    source.write_text(source.read_text() + "# changed\n")
    text = refusal(project, tmp_path)
    assert "sm_90 was compiled from other sources of the kernels" in text
    assert "Run build_aot.py again, or remove src/flashattn/_aot" in text


def test_a_damaged_kernel_fails_the_build(project, tmp_path):
    code = next(project.aot.glob("sm_90/*.cubin"))
    content = code.read_bytes()
    code.write_bytes(content[:-1] + bytes([content[-1] ^ 1]))
    text = refusal(project, tmp_path)
    assert "sm_90: " in text
    assert "cannot be packed" in text


def test_without_compiled_kernels_the_wheel_is_sources_only(project, tmp_path):
    shutil.rmtree(project.aot)
    assert kernels_in(build(project, tmp_path / "out")) == set()


def test_aot_targets_are_compiled_by_the_build_and_only_they_are_packed(project, tmp_path):
    shutil.rmtree(project.aot / "sm_90")
    (project.aot / "gfx942" / "stray").touch()
    packed = kernels_in(build(project, tmp_path / "out", FLASHATTN_AOT_TARGETS="sm_90"))
    assert {name.split("/")[2] for name in packed} == {"sm_90"}
    assert len(packed) == 1 + 2 * 2


def test_an_unknown_aot_target_fails_the_build(project, tmp_path):
    shutil.rmtree(project.aot)
    done = hook(project, "build_wheel", tmp_path, FLASHATTN_AOT_TARGETS="sm_70")
    assert done.returncode != 0
    assert "sm_70 is not among the supported sm_80" in done.stderr


def test_compilers_are_required_only_for_a_build_that_compiles(project):
    asked = "import setuptools.build_meta as m; print(m.get_requires_for_build_wheel())"
    assert project.run("-c", asked).stdout.splitlines()[-1] == "[]"
    with_targets = project.run("-c", asked, FLASHATTN_AOT_TARGETS="sm_90").stdout.splitlines()[-1]
    assert "triton==3.6.0" in with_targets
    assert "ninja" in with_targets
