"""Triton's compiler behind compile_spec, in processes of its own: what it leaves behind, races and sudden ends."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from tiny_project import ROOT, TinyProject

from flashattn import settings
from flashattn._version import __version__
from flashattn.declared import declared
from flashattn.jit.compile import code_environment
from flashattn.jit.resolve import Resolver
from flashattn.jit.spec import KernelSpec
from flashattn.jit.store import UserStore
from flashattn.specs import specs_of

pytestmark = pytest.mark.newest

# Importing build_aot makes the modules of the tree importable without its package being run.
_COMPILE = """
import contextlib, json, os, sys
import build_aot
from flashattn.jit import compile as compiler

home, opened = os.path.realpath(os.environ.get("HOME", "/none")), []

def spy(event, args):
    if event in ("open", "os.mkdir", "os.listdir", "os.scandir") and isinstance(args[0], (str, bytes)):
        path = os.path.realpath(os.fsdecode(args[0]))
        if path.startswith(home + os.sep):
            opened.append(path)

sys.addaudithook(spy)
if sys.argv[1:] == ["as Triton does"]:
    compiler._private_triton = contextlib.nullcontext
errors = []
for spec in build_aot.declared_specs("core", "sm_90").values():
    try:
        compiler.compile_spec(spec, source_digest="0" * 64)
    except compiler.CompileError as error:
        errors.append(str(error))
print(json.dumps({"opened": opened, "errors": errors, "compiled": len(build_aot.declared_specs("core", "sm_90"))}))
"""

_AT_ONCE = """
import threading
import build_aot
from flashattn.jit.compile import compile_spec
from triton import knobs

specs = list(build_aot.declared_specs("core", "sm_90", "bf16 d64 causal aligned").values())[:4]
before = knobs.cache.dir, knobs.compilation.always_compile, knobs.compilation.disable_line_info
alone = [compile_spec(spec, source_digest="0" * 64).code for spec in specs]
found, start = {}, threading.Barrier(len(specs))

def work(spec):
    start.wait()
    found[spec.key] = compile_spec(spec, source_digest="0" * 64).code

threads = [threading.Thread(target=work, args=(spec,)) for spec in specs]
for thread in threads:
    thread.start()
for thread in threads:
    thread.join()
assert [found[spec.key] for spec in specs] == alone
assert (knobs.cache.dir, knobs.compilation.always_compile, knobs.compilation.disable_line_info) == before
print(len(specs))
"""

_RESOLVE = """
import json, os, signal, sys
from pathlib import Path
from types import SimpleNamespace
import build_aot
from flashattn.jit.resolve import Resolver

cache, how = sys.argv[1:]
signal.alarm(100)
options = {"force_jit": False, "disable_jit": False, "on_aot_miss": "warn", "log_level": "error"}
options |= dict.fromkeys(("aot_dir", "record", "keep_ir"))
resolver = Resolver(
    settings=SimpleNamespace(cache_dir=Path(cache), **options),
    kernels_dir=build_aot.KERNELS,
    version="1",
    aot_dir=build_aot.ROOT / "none",
)
(spec,) = build_aot.declared_specs("core", "sm_90").values()

def end_before_the_assembler(event, args):
    if event == "subprocess.Popen" and any(str(word).endswith(".ptx") for word in args[1]):
        os.kill(os.getpid(), signal.SIGKILL)

if how == "killed":
    sys.addaudithook(end_before_the_assembler)
if how == "without waiting":
    resolver.store.lock_timeout = 0
published = []
publish = resolver.store.publish
resolver.store.publish = lambda *args, **options: published.append(publish(*args, **options))
if how != "killed":
    print("ready", flush=True)
    sys.stdin.readline()
code = resolver.resolve(spec).meta["code_sha256"]
source = resolver.decision(spec.key).source
print(json.dumps({"code": code, "source": source, "published": sum(published)}))
"""


@pytest.fixture
def project(tmp_path) -> TinyProject:
    return TinyProject(tmp_path / "tree", ("scale 2",))


@pytest.fixture
def temporary(tmp_path) -> Path:
    """Where the processes keep their temporary files."""
    (tmp_path / "temporary").mkdir()
    return tmp_path / "temporary"


# ---- What is left behind


def compile_there(project: TinyProject, *how: str, **environ: str) -> dict:
    done = project.run("-c", _COMPILE, *how, PYTHONDONTWRITEBYTECODE="1", **environ)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


def test_compiling_leaves_no_file_behind_and_does_not_look_into_home(project, tmp_path, temporary):
    home, cache = tmp_path / "home", tmp_path / "cache of Triton"
    (home / ".triton" / "cache").mkdir(parents=True)
    cache.mkdir()
    project.declare("scale 2", "scale 13")
    before = set(tmp_path.rglob("*"))
    report = compile_there(project, HOME=str(home), TMPDIR=str(temporary), TRITON_CACHE_DIR=str(cache))
    assert report["compiled"] == 2
    (error,) = report["errors"]
    assert "thirteen is refused" in error
    assert report["opened"] == []
    poisoned = tmp_path / "tree-poisoned"
    assert {path for path in set(tmp_path.rglob("*")) - before if poisoned not in (path, *path.parents)} == set()


def test_what_triton_leaves_in_home_by_itself_is_told(project, tmp_path, temporary):
    home = tmp_path / "home"
    home.mkdir()
    report = compile_there(project, "as Triton does", HOME=str(home), TMPDIR=str(temporary))
    assert report["opened"]
    assert list(home.rglob("*.cubin"))


@pytest.mark.parametrize("home", [None, "", "/dev/null", "/nonexistent"], ids=["unset", "empty", "a file", "missing"])
def test_compiling_needs_no_home(project, temporary, home, monkeypatch):
    monkeypatch.delenv("HOME", raising=False)
    environ = {} if home is None else {"HOME": home}
    assert compile_there(project, TMPDIR=str(temporary), **environ)["errors"] == []
    assert list(temporary.iterdir()) == []


# ---- Several processes, and one that is killed


def start(project: TinyProject, cache: Path, how: str, temporary: Path) -> subprocess.Popen:
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("FLASHATTN_", "TRITON_"))}
    return subprocess.Popen(
        [sys.executable, "-c", _RESOLVE, str(cache), how],
        cwd=project.root,
        env={**kept, "TMPDIR": str(temporary)},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def at_once(project: TinyProject, cache: Path, how: str, count: int, temporary: Path) -> list[dict]:
    """What each of `count` processes says that resolve the same kernel, begun when all of them are ready."""
    processes = [start(project, cache, how, temporary) for _ in range(count)]
    for process in processes:
        assert process.stdout.readline() == "ready\n"
    for process in processes:
        process.stdin.write("\n")
        process.stdin.flush()
    answers = [process.communicate() for process in processes]
    assert {process.returncode for process in processes} == {0}, answers
    return [json.loads(out) for out, _ in answers]


def usable_entries(cache: Path) -> list[str]:
    store = UserStore(cache)
    return [store.load(entry.key).meta["code_sha256"] for entry in store.entries()]


@pytest.mark.parametrize(("how", "count"), [("waiting", 16), ("without waiting", 4)])
def test_processes_that_want_the_same_cold_kernel_end_with_one_entry(project, tmp_path, temporary, how, count):
    cache = tmp_path / "cache"
    answers = at_once(project, cache, how, count, temporary)
    (code,) = usable_entries(cache)
    assert {answer["code"] for answer in answers} == {code}
    assert sum(answer["published"] for answer in answers) == 1
    if how == "waiting":
        assert sorted(answer["source"] for answer in answers) == ["compiled", *["user cache"] * (count - 1)]
    assert list((cache / "v1" / "tmp").iterdir()) == []
    assert list(temporary.iterdir()) == []


def test_a_compile_that_is_killed_leaves_the_cache_usable(project, tmp_path, temporary):
    cache = tmp_path / "cache"
    killed = start(project, cache, "killed", temporary)
    out, errors = killed.communicate()
    assert (killed.returncode, out) == (-9, ""), errors
    assert usable_entries(cache) == []
    (next_one,) = at_once(project, cache, "waiting", 1, temporary)
    assert (next_one["source"], next_one["published"]) == ("compiled", 1)
    (later,) = at_once(project, cache, "waiting", 1, temporary)
    assert (later["source"], later["published"]) == ("user cache", 0)
    assert usable_entries(cache) == [next_one["code"]] == [later["code"]]


# ---- Intermediate code


def small_spec(target: str) -> KernelSpec:
    return next(
        spec for variant in declared("core", target) for spec in specs_of(variant, target) if "pre" in spec.kernel
    )


@pytest.mark.parametrize(("target", "assembly"), [("sm_90", "ptx"), ("gfx942", "amdgcn")])
def test_intermediate_code_is_kept_where_the_setting_says_and_changes_nothing(tmp_path, target, assembly):
    spec, made = small_spec(target), []
    for name, environ in (("kept", {"FLASHATTN_KEEP_IR": str(tmp_path / "ir")}), ("not kept", {})):
        resolver = Resolver(
            settings=settings.read({**environ, "FLASHATTN_CACHE_DIR": str(tmp_path / name)}),
            kernels_dir=ROOT / "src" / "flashattn" / "kernels",
            version=__version__,
            aot_dir=tmp_path / "none",
        )
        made.append(resolver.resolve(spec))
        assert resolver.compiles == 1
        kept = {path.name: path.read_text() for path in (tmp_path / "ir").iterdir()}
        if name == "kept":
            first = kept
    assert made[0] == made[1]
    assert kept == first
    assert {path.name for path in tmp_path.iterdir()} == {"ir", "kept", "not kept"}
    stem = f"{spec.kernel}-{spec.key[:16]}"
    assert {f"{stem}.{stage}" for stage in ("ttir", "ttgir", "llir", assembly)} <= kept.keys()
    for text in kept.values():
        assert re.search(rf"\b{spec.kernel}\b", text)


@pytest.mark.parametrize(
    ("variables", "counted"),
    [
        ({"DISABLE_PTXAS_OPT": "1", "PTXAS_OPTIONS": "-O1"}, {"DISABLE_PTXAS_OPT", "PTXAS_OPTIONS"}),
        ({"TRITON_OF_TOMORROW": "1"}, {"TRITON_OF_TOMORROW"}),
        (
            {"AMDGCN_USE_BUFFER_OPS": "0", "TRITON_HIP_USE_ASYNC_COPY": "0"},
            {"AMDGCN_USE_BUFFER_OPS", "TRITON_HIP_USE_ASYNC_COPY"},
        ),
        ({"TRITON_ENABLE_ASAN": "0", "TRITON_F32_DEFAULT": "", "TRITON_CACHE_DIR": "x"}, set()),
        ({"ENABLE_METRICS": "1", "DISABLE_TELEMETRY": "1", "LLVM_CONFIG": "x", "ALLOW_ROOT": "1"}, set()),
    ],
)
def test_variables_that_change_code_are_counted_and_no_others(variables, counted):
    """One too many makes every process miss the cache; one of Triton's too few is a wrong kernel."""
    assert code_environment(variables).keys() == counted


def test_a_tool_counts_by_its_contents_and_not_by_its_place(tmp_path):
    found = []
    for name, content in (("a", b"one"), ("b", b"one"), ("c", b"two")):
        (tmp_path / name).write_bytes(content)
        found.append(code_environment({"TRITON_PTXAS_PATH": str(tmp_path / name)}))
    assert found[0] == found[1] != found[2]


def test_kernels_compiled_at_the_same_time_are_those_compiled_one_by_one():
    """Bytes are the same, and Triton's own settings are as they were."""
    environ = {**os.environ, "PYTHONPATH": f"{ROOT}{os.pathsep}{ROOT / 'src'}"}
    done = subprocess.run([sys.executable, "-c", _AT_ONCE], capture_output=True, text=True, env=environ, timeout=300)
    assert done.returncode == 0, done.stderr[-3000:]
    assert int(done.stdout) >= 3
