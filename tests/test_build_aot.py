"""build_aot.py on a project of one small kernel: what it compiles and what it says."""

from __future__ import annotations

import json

import pytest
from tiny_project import TinyProject


@pytest.fixture
def project(tmp_path) -> TinyProject:
    return TinyProject(tmp_path / "tree")


def manifest(project: TinyProject, target: str = "sm_90") -> dict:
    return json.loads((project.aot / target / "MANIFEST.json").read_text())


def objects(project: TinyProject) -> dict[str, int]:
    """Name -> time of each description in the work folder."""
    return {path.name: path.stat().st_mtime_ns for path in (project.root / ".aot" / "objects").glob("*.json")}


def test_build_compiles_what_is_declared_without_torch_and_a_second_one_compiles_nothing(project):
    # TinyProject puts a torch first on the path that cannot be imported, and its package must not be either.
    first = project.build()
    assert first.returncode == 0, first.stdout + first.stderr
    assert "2 kernels for sm_90: 2 to compile" in first.stdout
    labels = sorted(entry["label"] for entry in manifest(project)["entries"].values())
    assert [label.split()[-1] for label in labels] == ["FACTOR=2]", "FACTOR=3]"]
    before = objects(project)
    second = project.build()
    assert "0 to compile" in second.stdout
    assert objects(project) == before


def test_build_compiles_again_only_what_changed_or_is_damaged(project):
    project.build()
    before = objects(project)
    damaged = project.root / ".aot" / "objects" / min(before)
    damaged.write_bytes(damaged.read_bytes()[:-9])
    project.declare("scale 2", "scale 3", "scale 5")
    done = project.build()
    assert "3 kernels for sm_90: 2 to compile" in done.stdout
    assert len(manifest(project)["entries"]) == 3
    assert objects(project)[max(before)] == before[max(before)]


def test_folder_of_a_target_holds_only_its_own_kernels_after_a_change_of_sources(project):
    project.build()
    old = {path.name for path in (project.aot / "sm_90").iterdir()}
    source = project.package / "kernels" / "scale.py"
    source.write_text(source.read_text().replace("x * FACTOR", "x + FACTOR"))
    assert project.build().returncode == 0
    new = {path.name for path in (project.aot / "sm_90").iterdir()}
    assert new & old == {"MANIFEST.json"}
    assert len(new) == 1 + 2 * 2


def test_builds_in_other_folders_with_other_hash_seeds_give_equal_bytes(tmp_path):
    def content(name: str, seed: str) -> dict[str, bytes]:
        project = TinyProject(tmp_path / name)
        assert project.build(targets="sm_90,gfx942", PYTHONHASHSEED=seed).returncode == 0
        return {str(path.relative_to(project.aot)): path.read_bytes() for path in project.aot.glob("*/*")}

    one = content("one", "1")
    assert len(one) == 2 * (1 + 2 * 2)
    assert content("somewhere else", "2") == one


def test_kernels_that_fail_crash_or_hang_fail_the_build_by_name_and_the_others_are_kept(project):
    project.write("src/flashattn/kernels/crashes.py", "import os\n\nos.abort()\n")
    project.write("src/flashattn/kernels/hangs.py", "import signal\n\nsignal.pause()\n")
    project.declare("scale 2", "crashes 4", "scale 13", "hangs 6", "scale 7")
    done = project.build("--jobs", 1, "--timeout", 10)
    assert done.returncode == 1
    failed = [line for line in done.stderr.splitlines() if line.startswith("failed: ")]
    assert len(failed) == 3
    assert "FACTOR=4]: the compiler ended its process (SIGABRT)" in failed[0]
    assert "FACTOR=13]" in failed[1]
    assert "thirteen is refused" in done.stderr
    assert "FACTOR=6]: not compiled within 10 s" in failed[2]
    assert "3 of 5 kernels failed" in done.stderr
    assert not project.aot.exists()
    assert len(objects(project)) == 2


def test_a_failed_build_leaves_a_log_for_each_kernel_that_failed(project):
    project.declare("scale 13", "scale 3")
    done = project.build()
    logs = list((project.root / ".aot" / "logs").iterdir())
    assert len(logs) == 1
    assert str(logs[0]) in done.stderr
    assert "thirteen is refused" in logs[0].read_text()


@pytest.mark.parametrize("targets", ["sm_70", "sm_90,sm_1", ""])
def test_unknown_and_empty_targets_are_a_usage_error_with_the_supported_list(project, targets):
    done = project.build(targets=targets)
    assert done.returncode == 2
    assert "sm_80, sm_86, sm_89, sm_90, sm_100, sm_120, gfx942, gfx950" in done.stderr


@pytest.mark.parametrize("options", [["--lock"], ["--only", "no such word"]])
def test_a_lock_of_a_part_and_an_empty_choice_are_usage_errors(project, options):
    assert project.build(*options).returncode == 2


def test_a_variable_that_changes_machine_code_is_refused(project):
    done = project.build(DISABLE_LLVM_OPT="1")
    assert done.returncode == 2
    assert "DISABLE_LLVM_OPT" in done.stderr


@pytest.mark.parametrize(("options", "count"), [(["--only", "factor=3 aligned"], 1), (["--limit", 1], 1), ([], 2)])
def test_a_part_of_what_is_declared_can_be_built(project, options, count):
    assert project.build(*options).returncode == 0
    assert len(manifest(project)["entries"]) == count


def test_list_counts_variants_and_kernels_of_each_target_and_gives_a_reason_for_each_axis(project):
    done = project.build("--list", targets="sm_90,gfx942")
    rows = [line.split() for line in done.stdout.splitlines()]
    assert ["sm_90", "2", "2"] in rows
    assert ["gfx942", "2", "2"] in rows
    assert "scale 2, scale 3: somebody multiplies by each" in done.stdout
    assert not (project.root / ".aot").exists()


@pytest.fixture(scope="module")
def locked(tmp_path_factory) -> TinyProject:
    """Built for every target, with a lock file."""
    project = TinyProject(tmp_path_factory.mktemp("locked") / "tree", ("scale 2",))
    done = project.run("build_aot.py", "--lock")
    assert done.returncode == 0, done.stdout + done.stderr
    return project


def check(project: TinyProject) -> tuple[int, str]:
    done = project.run("build_aot.py", "--check", "--out", project.aot)
    return done.returncode, done.stderr


def test_check_is_content_with_what_was_just_built_and_compiles_nothing(locked):
    before = objects(locked)
    assert check(locked) == (0, "")
    assert objects(locked) == before
    assert len((locked.root / "aot.lock").read_text().splitlines()) == 2 + 8


@pytest.mark.parametrize(
    ("plant", "said"),
    [
        (lambda p: p.declare("scale 2", "scale 3"), "declared, not in aot.lock: scale[sm_80 fp32 aligned FACTOR=3]"),
        (lambda p: p.declare("scale 3"), "in aot.lock, not declared: scale[sm_90 fp32 aligned FACTOR=2]"),
        (lambda p: p.write("src/flashattn/kernels/more.py", "x = 1\n"), "aot.lock was written from other sources"),
        (lambda p: (p.root / "aot.lock").unlink(), "aot.lock is missing"),
        (lambda p: (p.aot / "gfx950" / "MANIFEST.json").unlink(), "gfx950 has no MANIFEST.json"),
        (lambda p: next(p.aot.glob("sm_86/*.cubin")).write_bytes(b"damaged"), "_aot/sm_86: "),
        (lambda p: replace_sha256_in_lock(p), "has other machine code than aot.lock: scale[gfx942"),
    ],
    ids=["declared more", "declared other", "sources", "no lock", "not built", "damaged", "other code"],
)
def test_check_tells_each_difference_and_exits_1(locked, plant, said):
    changed = ["aot.lock", "src/flashattn/declared.py", "src/flashattn/_aot/gfx950/MANIFEST.json"]
    changed += [str(path.relative_to(locked.root)) for path in locked.aot.glob("sm_86/*.cubin")]
    kept = {name: (locked.root / name).read_bytes() for name in changed}
    try:
        plant(locked)
        code, text = check(locked)
    finally:
        (locked.package / "kernels" / "more.py").unlink(missing_ok=True)
        for name, content in kept.items():
            (locked.root / name).write_bytes(content)
    assert code == 1
    assert said in text
    assert check(locked) == (0, "")


def replace_sha256_in_lock(project: TinyProject) -> None:
    path = project.root / "aot.lock"
    lines = path.read_text().splitlines()
    words = lines[2].split(" ")
    lines[2] = " ".join([*words[:2], "0" * 64, *words[3:]])
    path.write_text("\n".join(lines) + "\n")
