"""Where a kernel comes from, what is said about it, and what is never done unasked."""

from __future__ import annotations

import json
import logging
import os
import re
import signal
import subprocess
import sys
import threading
from pathlib import Path

import pytest
from store_worker import Worker
from stub_compiler import VERSION, StubCompiler, artifact_of, spec, write_sources, write_wheel

from flashattn.jit import log, record, resolve
from flashattn.jit.artifact import ArtifactError
from flashattn.jit.compile import CompileError, toolchain
from flashattn.jit.decision import REASONS
from flashattn.jit.resolve import KernelMissing, Rejected, Resolver
from flashattn.jit.spec import source_digest
from flashattn.jit.store import UserStore
from flashattn.settings import Settings

SPEC, OTHER = spec(2), spec(3)
LABEL = SPEC.label()
MODES = {
    "default": {},
    "error": {"on_aot_miss": "error"},
    "disabled": {"disable_jit": True},
    "forced": {"force_jit": True},
}


class Place:
    """Sources, a wheel and a cache below `root`, and resolvers that use them."""

    def __init__(self, root: Path):
        self.kernels = write_sources(root / "kernels")
        self.aot = root / "_aot"
        self.cache = UserStore(root / "cache")
        self.compiler = StubCompiler()

    @property
    def digest(self) -> str:
        return source_digest(self.kernels)

    def resolver(self, *, declared=(), compiler=None, version=VERSION, **values) -> Resolver:
        return Resolver(
            settings=Settings(cache_dir=self.cache.root, **values),
            kernels_dir=self.kernels,
            version=version,
            aot_dir=self.aot,
            declared=lambda target: frozenset(each.key for each in declared if each.target == target),
            compile=compiler or self.compiler,
        )

    def fill_cache(self, *specs) -> None:
        for each in specs:
            assert self.cache.publish(artifact_of(each, self.digest))

    def damage_wheel(self) -> None:
        for path in (self.aot / "sm_90").glob("*.cubin"):
            path.write_bytes(b"no machine code")

    def damage_cache(self) -> None:
        for path in self.cache.root.rglob("kernel.cubin"):
            path.write_bytes(b"no machine code")


@pytest.fixture
def place(tmp_path, monkeypatch):
    for name in list(os.environ):
        if name.startswith(("FLASHATTN_", "TRITON_")):
            monkeypatch.delenv(name)
    return Place(tmp_path)


def warnings(caplog) -> list[str]:
    return [each.getMessage() for each in caplog.records if each.levelno == logging.WARNING]


def reasons(resolver, wanted=SPEC) -> list[tuple[str, str]]:
    return [(source, reason) for source, reason, _ in resolver.decision(wanted.key).rejected]


# ---- The table


STATES = ("in the wheel", "damaged in the wheel", "declared and not in the wheel", "not declared")


def arrange(place, state) -> tuple:
    """Bring the wheel into `state`. Returns what is declared."""
    if state in ("in the wheel", "damaged in the wheel"):
        write_wheel(place.aot, [SPEC, OTHER])
    else:
        write_wheel(place.aot, [OTHER])
    if state == "damaged in the wheel":
        place.damage_wheel()
    return () if state == "not declared" else (SPEC,)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("cached", [True, False], ids=["cached", "not cached"])
@pytest.mark.parametrize("state", STATES)
def test_every_row_of_the_table(place, caplog, state, cached, mode):
    declared = arrange(place, state)
    if cached:
        place.fill_cache(SPEC)
    resolver = place.resolver(declared=declared, **MODES[mode])
    if mode == "forced":
        expected = "compiled"
    elif state == "in the wheel":
        expected = "wheel"
    elif cached:
        expected = "user cache"
    else:
        expected = "compiled" if mode == "default" else "missing"
    if expected == "missing":
        with pytest.raises(KernelMissing):
            resolver.resolve(SPEC)
    else:
        assert resolver.resolve(SPEC).spec_key == SPEC.key
    assert resolver.decision(SPEC.key).source == expected
    assert place.compiler.compiled == ([SPEC.key] if expected == "compiled" else [])
    warned = mode != "forced" and state in ("damaged in the wheel", "declared and not in the wheel")
    assert len(warnings(caplog)) == int(warned)


def test_the_first_source_wins_and_memory_comes_before_all(place):
    write_wheel(place.aot, [SPEC])
    place.fill_cache(SPEC)
    resolver = place.resolver()
    first = resolver.resolve(SPEC)
    place.damage_wheel()
    place.damage_cache()
    assert resolver.resolve(SPEC) is first
    assert resolver.counts == {"wheel": 1}


def test_a_hit_in_the_wheel_touches_no_cache_and_no_compiler(place, tmp_path):
    write_wheel(place.aot, [SPEC])
    place.resolver(disable_jit=True).resolve(SPEC)
    assert not place.cache.root.exists()


def test_what_is_compiled_is_found_by_the_next_process(place):
    made = place.resolver().resolve(SPEC)
    second = place.resolver()
    assert second.resolve(SPEC) == made
    assert second.decision(SPEC.key).source == "user cache"
    assert (second.compiles, place.compiler.compiled) == (0, [SPEC.key])


def test_a_resolver_touches_no_file_before_it_is_asked(place, monkeypatch):
    monkeypatch.setattr(resolve, "source_digest", None)
    monkeypatch.setattr(resolve, "UserStore", None)
    assert place.resolver().decisions() == ()


def test_the_folder_of_the_settings_stands_in_for_the_wheels(place, tmp_path):
    write_wheel(tmp_path / "_own", [SPEC], digest=place.digest)
    resolver = place.resolver(aot_dir=tmp_path / "_own")
    resolver.resolve(SPEC)
    assert resolver.decision(SPEC.key).source == "wheel"


def test_other_sources_or_another_tool_are_another_entry(place, monkeypatch):
    place.resolver().resolve(SPEC)
    (place.kernels / "scale.py").write_text("def scale(): 'changed'\n")
    place.resolver().resolve(SPEC)
    monkeypatch.setenv("DISABLE_LLVM_OPT", "1")
    place.resolver().resolve(SPEC)
    assert place.compiler.compiled == [SPEC.key] * 3
    assert len(list(place.cache.entries())) == 3


# ---- Forced, frozen, unreadable


def test_forcing_compiles_once_a_process_and_replaces_the_entry(place):
    place.fill_cache(SPEC)
    other = StubCompiler()

    def renamed(wanted, *, source_digest):
        other(wanted, source_digest=source_digest)
        return artifact_of(wanted, source_digest, name="renamed")

    resolver = place.resolver(force_jit=True, on_aot_miss="error", compiler=renamed)
    assert [resolver.resolve(SPEC).meta["name"] for _ in range(2)] == ["renamed"] * 2
    assert other.compiled == [SPEC.key]
    assert place.resolver(disable_jit=True).resolve(SPEC).meta["name"] == "renamed"


def test_after_freeze_what_would_be_compiled_raises(place):
    write_wheel(place.aot, [SPEC])
    place.fill_cache(OTHER)
    resolver = place.resolver()
    warm = resolver.resolve(spec(4))
    resolver.freeze()
    assert resolver.resolve(spec(4)) is warm
    assert [resolver.resolve(each).spec_key for each in (SPEC, OTHER)] == [SPEC.key, OTHER.key]
    with pytest.raises(KernelMissing, match=r"freeze\(\) was called: call it once before freeze\(\)"):
        resolver.resolve(spec(5))
    assert place.compiler.compiled == [spec(4).key]


def test_a_frozen_resolver_does_not_compile_by_force_either(place):
    resolver = place.resolver(force_jit=True)
    resolver.freeze()
    with pytest.raises(KernelMissing, match="freeze"):
        resolver.resolve(SPEC)


def test_without_readable_sources_the_wheel_and_what_was_compiled_are_used(place):
    write_wheel(place.aot, [SPEC])
    place.fill_cache(OTHER)
    (place.kernels / "scale.py").rename(place.kernels / "scale.pyc")
    resolver = place.resolver()
    resolver.resolve(SPEC)
    resolver.resolve(OTHER)
    assert [each.source for each in resolver.decisions()] == ["wheel", "user cache"]
    assert resolver.decision(SPEC.key).note == (
        "the kernels' sources cannot be read; the wheel is believed, being of the same version"
    )


def test_without_readable_sources_and_wheel_nothing_can_be_compiled(place):
    (place.kernels / "scale.py").unlink()
    resolver = place.resolver()
    with pytest.raises(KernelMissing, match=r"since the kernels' sources cannot be read: install the sources"):
        resolver.resolve(SPEC)
    assert reasons(resolver) == [("wheel", "not built"), ("user cache", "unreadable"), ("compile", "unreadable")]


def test_what_is_compiled_after_its_sources_changed_is_used_and_not_kept(place, caplog):
    compiler = StubCompiler(lambda wanted: (place.kernels / "scale.py").write_text("def scale(): 'edited'\n"))
    resolver = place.resolver(compiler=compiler)
    assert resolver.resolve(SPEC).spec_key == SPEC.key
    assert list(place.cache.entries()) == []
    assert warnings(caplog) == ["the kernels' sources changed while this process ran: what it compiles is not kept"]


def test_an_error_of_the_compiler_reaches_the_caller_and_is_not_remembered(place):
    def fail(wanted):
        if len(compiler.compiled) == 1:
            raise CompileError(f"{wanted.label()}: no such register")

    compiler = StubCompiler(fail)
    resolver = place.resolver(compiler=compiler)
    with pytest.raises(CompileError, match="no such register"):
        resolver.resolve(SPEC)
    assert resolver.decision(SPEC.key).source == "missing"
    resolver.resolve(SPEC)
    assert resolver.decision(SPEC.key).source == "compiled"


def test_a_compiler_that_gives_something_malformed_is_not_believed(place):
    def malformed(wanted, *, source_digest):
        return artifact_of(wanted, source_digest, code_bytes=1)

    with pytest.raises(ArtifactError, match="size and digest"):
        place.resolver(compiler=malformed).resolve(SPEC)


# ---- Reasons


def rejected(place, wanted=SPEC, **values) -> dict[tuple[str, str], str]:
    """(source, reason) -> text of what was passed over."""
    resolver = place.resolver(**values)
    try:
        resolver.resolve(wanted)
    except KernelMissing as error:
        assert error.rejected == resolver.decision(wanted.key).rejected
    found = resolver.decision(wanted.key).rejected
    assert all(isinstance(each, Rejected) and each.reason in REASONS for each in found)
    return {(each.source, each.reason): each.text for each in found}


def test_the_reason_not_declared(place):
    write_wheel(place.aot, [OTHER])
    assert rejected(place)["wheel", "not declared"] == "its MANIFEST.json for sm_90 does not list it"


def test_the_reason_not_built(place):
    assert rejected(place)["wheel", "not built"] == "it holds no kernels at all"
    write_wheel(place.aot, [OTHER])
    assert rejected(place, declared=[SPEC])["wheel", "not built"] == (
        "it is declared for sm_90, and this wheel was built without it"
    )
    assert rejected(place, spec(2, "sm_87"))["wheel", "not built"] == "it holds kernels for sm_90 and none for sm_87"


def test_the_reason_absent(place):
    key = artifact_of(SPEC, place.digest).key
    assert rejected(place)["user cache", "absent"] == f"no entry {key[:12]} in {place.cache.root}"


def test_the_reason_arch(place):
    write_wheel(place.aot, [spec(2, "sm_80")]).rename(place.aot / "sm_90")
    text = "its folder sm_90 holds kernels for sm_80, and a target is matched exactly"
    assert rejected(place)["wheel", "arch"] == text


def test_the_reason_source(place):
    write_wheel(place.aot, [SPEC], digest="a" * 64)
    assert rejected(place)["wheel", "source"] == (
        f"it was compiled from other sources of the kernels (aaaaaaaaaaaa, here they are {place.digest[:12]})"
    )


def test_the_reason_environment_taint(place, monkeypatch):
    """The wheel was compiled without the variable and is used; what is in the cache was too, and is not."""
    place.fill_cache(SPEC)
    monkeypatch.setenv("DISABLE_LLVM_OPT", "1")
    assert rejected(place)["user cache", "environment taint"] == (
        "DISABLE_LLVM_OPT is set and changes machine code, so only kernels made so fit"
    )
    write_wheel(place.aot, [SPEC])
    assert rejected(place) == {}


def test_the_reason_environment_taint_of_a_wheel(place):
    write_wheel(place.aot, [SPEC], toolchain={"triton": "3.6.0", "env": {"DISABLE_LLVM_OPT": "1"}})
    text = "it was compiled with DISABLE_LLVM_OPT set, which changes code"
    assert rejected(place)["wheel", "environment taint"] == text


def test_the_reason_schema(place):
    manifest = write_wheel(place.aot, [SPEC]) / "MANIFEST.json"
    manifest.write_text(manifest.read_text().replace('"schema": 1', '"schema": 7'))
    assert rejected(place)["wheel", "schema"] == "its MANIFEST.json has schema 7, this version reads 1"


def test_the_reason_corrupt(place):
    write_wheel(place.aot, [SPEC])
    place.damage_wheel()
    place.fill_cache(SPEC)
    place.damage_cache()
    found = rejected(place)
    assert found["wheel", "corrupt"].endswith("...cubin does not have the size and digest in MANIFEST.json")
    assert found["user cache", "corrupt"] == "its machine code does not have the size and digest its description names"


def test_the_reason_unreadable(place):
    for path in write_wheel(place.aot, [SPEC]).glob("*.cubin"):
        path.unlink()
        path.mkdir()
    assert rejected(place)["wheel", "unreadable"].endswith("...cubin cannot be read (Is a directory)")


def test_the_reason_forced(place):
    text = "FLASHATTN_FORCE_JIT is on"
    assert rejected(place, force_jit=True) == {("wheel", "forced"): text, ("user cache", "forced"): text}


def test_the_reason_disabled(place):
    assert rejected(place, disable_jit=True)["compile", "disabled"] == "FLASHATTN_DISABLE_JIT is on"
    assert rejected(place, on_aot_miss="error")["compile", "disabled"] == "FLASHATTN_ON_AOT_MISS is error"


def test_the_reason_frozen(place):
    resolver = place.resolver()
    resolver.freeze()
    with pytest.raises(KernelMissing) as missing:
        resolver.resolve(SPEC)
    assert missing.value.rejected[-1] == Rejected("compile", "frozen", "freeze() was called")


@pytest.mark.parametrize(
    ("values", "why"),
    [
        ({"disable_jit": True}, "FLASHATTN_DISABLE_JIT is on: unset FLASHATTN_DISABLE_JIT"),
        ({"on_aot_miss": "error"}, "FLASHATTN_ON_AOT_MISS is error: set FLASHATTN_ON_AOT_MISS=warn"),
    ],
)
def test_a_missing_kernel_is_told_in_one_sentence_with_what_to_do(place, values, why):
    write_wheel(place.aot, [OTHER])
    resolver = place.resolver(**values)
    with pytest.raises(KernelMissing) as missing:
        resolver.resolve(SPEC)
    key = artifact_of(SPEC, place.digest).key
    assert str(missing.value) == (
        f"{LABEL} is in no source of compiled kernels (wheel: not declared, its MANIFEST.json for sm_90 does not list "
        f"it; user cache: absent, no entry {key[:12]} in {place.cache.root}) and is not compiled, since {why}, or "
        "compile it beforehand with `flashattn warmup`, or install a wheel that holds it"
    )
    assert missing.value.spec_key == SPEC.key


def test_a_decision_can_be_read(place):
    write_wheel(place.aot, [OTHER])
    resolver = place.resolver()
    artifact = resolver.resolve(SPEC)
    decision = resolver.decision(SPEC.key)
    assert (decision.artifact_key, decision.label) == (artifact.key, LABEL)
    first, wheel, cache = decision.describe().splitlines()
    assert first == f"{LABEL}: compiled here, {decision.seconds:.3f} s"
    assert wheel == "  wheel: not declared: its MANIFEST.json for sm_90 does not list it"
    assert cache.startswith("  user cache: absent: no entry ")
    assert resolver.decision(OTHER.key) is None
    assert resolver.decisions() == (decision,)


# ---- What is said


def test_a_compile_is_told_before_and_after(place, caplog):
    compiler = StubCompiler(lambda wanted: log.logger.info("in between"))
    place.resolver(compiler=compiler).resolve(SPEC)
    before, between, after = [each.getMessage() for each in caplog.records]
    assert (before, between) == (f"compiling {LABEL} ...", "in between")
    assert re.fullmatch(re.escape(f"compiled {LABEL} in ") + r"\d+\.\d s", after)
    assert {each.levelno for each in caplog.records} == {logging.INFO}


def test_a_damaged_kernel_of_the_wheel_is_warned_of_with_its_reason(place, caplog):
    write_wheel(place.aot, [SPEC])
    place.damage_wheel()
    place.resolver().resolve(SPEC)
    (text,) = warnings(caplog)
    assert text.startswith(f"{LABEL}: the wheel's kernel is not used (corrupt: ")
    assert text.endswith("); the user's cache is tried, then the compiler")


def test_a_wheel_that_does_not_fit_is_warned_of_once_for_all_its_kernels(place, caplog):
    write_wheel(place.aot, [SPEC, OTHER], digest="a" * 64)
    resolver = place.resolver()
    resolver.resolve(SPEC)
    resolver.resolve(OTHER)
    (text,) = warnings(caplog)
    assert text.startswith("the wheel's kernels for sm_90 are not used (source: it was compiled from other sources")


def test_a_wheel_that_was_damaged_is_warned_of_whatever_is_asked_for(place, caplog):
    (write_wheel(place.aot, [OTHER]) / "MANIFEST.json").write_text("")
    place.resolver().resolve(SPEC)
    assert len(warnings(caplog)) == 1


def test_a_gpu_that_no_wheel_is_built_for_is_no_reason_to_warn(place, caplog):
    write_wheel(place.aot, [SPEC])
    place.resolver(declared=[SPEC]).resolve(spec(2, "sm_87"))
    assert warnings(caplog) == []


def test_a_damaged_entry_of_the_cache_is_warned_of_once_and_repaired(place, caplog):
    place.fill_cache(SPEC)
    place.damage_cache()
    place.resolver().resolve(SPEC)
    key = artifact_of(SPEC, place.digest).key
    (text,) = warnings(caplog)
    assert text == (
        f"{LABEL}: the entry {key[:12]} in {place.cache.root} is not used (corrupt: its machine code does not have the "
        "size and digest its description names)"
    )
    caplog.clear()
    again = place.resolver()
    again.resolve(SPEC)
    assert again.decision(SPEC.key).source == "user cache"
    assert warnings(caplog) == []


def test_a_damaged_entry_is_set_aside_where_nothing_can_take_its_place(place):
    place.fill_cache(SPEC)
    place.damage_cache()
    found = [rejected(place, disable_jit=True) for _ in range(2)]
    assert [("user cache", reason) in seen for seen, reason in zip(found, ("corrupt", "absent"), strict=True)] == [
        True
    ] * 2


def test_a_failing_kernel_is_warned_of_once_however_often_it_is_asked_for(place, caplog):
    write_wheel(place.aot, [SPEC])
    place.damage_wheel()
    resolver = place.resolver(disable_jit=True)
    for _ in range(3):
        with pytest.raises(KernelMissing):
            resolver.resolve(SPEC)
    (text,) = warnings(caplog)
    assert text.endswith("the user's cache is tried; compiling is off")


def printed_by(setup: str, level: str | None = None) -> str:
    """What a process prints that runs `setup` and then logs a line at info and one at warning."""
    code = f"""
import logging, sys, types
package = types.ModuleType("flashattn")
package.__path__ = [{str(Path(resolve.__file__).parents[1])!r}]
sys.modules["flashattn"] = package
from flashattn.jit import log
{setup}
log.configure({level!r})
log.configure({level!r})
log.logger.info("compiling")
log.logger.warning("damaged")
"""
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stderr


def test_a_program_that_sets_up_no_logging_sees_compiles():
    assert printed_by("") == "flashattn: compiling\nflashattn: damaged\n"


def test_the_level_can_be_chosen():
    assert printed_by("", "warning") == "flashattn: damaged\n"
    assert printed_by("", "error") == ""


def test_a_program_that_sets_up_logging_gets_the_lines_in_its_own_way_and_once():
    assert printed_by("logging.basicConfig(format='<%(message)s>')") == "<compiling>\n<damaged>\n"
    own = "log.logger.addHandler(logging.StreamHandler()); log.logger.propagate = False; log.logger.setLevel('WARNING')"
    assert printed_by(own) == "damaged\n"


def test_the_root_logger_is_left_as_it_is():
    before = (logging.getLogger().level, list(logging.getLogger().handlers))
    log.configure("info")
    assert (logging.getLogger().level, logging.getLogger().handlers) == before


# ---- Records


def test_each_kernel_that_is_asked_for_is_recorded_once(place, tmp_path):
    path = tmp_path / "specs.jsonl"
    write_wheel(place.aot, [SPEC])
    resolver = place.resolver(record=path, on_aot_miss="error")
    for _ in range(2):
        resolver.resolve(SPEC)
        with pytest.raises(KernelMissing):
            resolver.resolve(OTHER)
    assert [json.loads(line)["label"] for line in path.read_text().splitlines()] == [LABEL, OTHER.label()]
    place.resolver(record=path).resolve(SPEC)
    assert record.read(path) == [SPEC, OTHER]


def test_a_record_that_cannot_be_written_fails_no_call(place, tmp_path, caplog):
    resolver = place.resolver(record=tmp_path)
    resolver.resolve(SPEC)
    resolver.resolve(OTHER)
    assert warnings(caplog) == [f"FLASHATTN_RECORD={tmp_path} cannot be written (Is a directory)"]


@pytest.mark.parametrize("line", ["{", '{"spec": 5}', '{"spec": {"module": "x"}}', "[]"])
def test_a_line_that_is_no_record_is_named(tmp_path, line):
    (tmp_path / "specs.jsonl").write_text(f"\n{line}\n".lstrip())
    with pytest.raises(ValueError, match="line 1 does not hold a kernel's spec"):
        record.read(tmp_path / "specs.jsonl")


# ---- Threads and processes


def run_threads(number, work) -> None:
    threads = [threading.Thread(target=work, args=(index,)) for index in range(number)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert not any(thread.is_alive() for thread in threads)


def test_16_threads_compile_a_cold_kernel_once(place):
    start, found = threading.Barrier(16), []
    resolver = place.resolver()

    def work(index):
        start.wait()
        found.append(resolver.resolve(SPEC))

    run_threads(16, work)
    assert place.compiler.compiled == [SPEC.key]
    assert {id(each) for each in found} == {id(found[0])}
    assert resolver.counts == {"compiled": 1}


def test_different_kernels_are_compiled_at_the_same_time(place):
    together = threading.Barrier(4, timeout=30)
    resolver = place.resolver(compiler=StubCompiler(lambda wanted: together.wait()))
    run_threads(4, lambda index: resolver.resolve(spec(index)))
    assert resolver.compiles == 4


def test_kernels_that_are_needed_together_are_compiled_together(place):
    together = threading.Barrier(3, timeout=30)
    resolver = place.resolver(compiler=StubCompiler(lambda wanted: together.wait()))
    found = resolver.resolve_all([spec(index) for index in range(3)])
    assert [artifact.meta["spec_key"] for artifact in found] == [spec(index).key for index in range(3)]


def test_of_kernels_that_are_needed_together_the_one_that_fails_is_told(place):
    def during(wanted):
        if wanted.key == spec(1).key:
            raise RuntimeError("this one")

    resolver = place.resolver(compiler=StubCompiler(during))
    with pytest.raises(RuntimeError, match="this one"):
        resolver.resolve_all([spec(index) for index in range(3)])
    assert resolver.compiles == 2


def test_a_child_that_was_forked_during_a_compile_can_compile_too(place):
    started, go_on = threading.Event(), threading.Event()

    def during(wanted):
        if os.getpid() == parent:
            started.set()
            assert go_on.wait(30)

    parent, resolver = os.getpid(), place.resolver(compiler=StubCompiler(during))
    resolver.store.lock_timeout = 0.0
    thread = threading.Thread(target=resolver.resolve, args=(SPEC,))
    thread.start()
    assert started.wait(30)
    child = os.fork()
    if child == 0:
        # A child that hangs is ended by the alarm, and its status says so.
        signal.alarm(30)
        os._exit(0 if resolver.resolve(SPEC).spec_key == SPEC.key else 1)
    status = os.waitpid(child, 0)[1]
    go_on.set()
    thread.join(30)
    assert os.waitstatus_to_exitcode(status) == 0


def test_who_finds_the_kernel_after_waiting_for_the_lock_does_not_compile(tmp_path):
    kernels = str(write_sources(tmp_path / "kernels"))
    command = {"cache_dir": str(tmp_path / "cache"), "kernels_dir": kernels, "factors": [2]}
    builder, waiter = Worker(), Worker()
    builder.tell(builder="hold", **command)
    builder.hear()
    waiter.tell(**command)
    for line in waiter.process.stderr:
        if "another process is compiling" in line:
            break
    builder.tell()
    assert builder.hear()["sources"] == ["compiled"]
    assert waiter.hear()["sources"] == ["user cache"]
    builder.end()
    waiter.end()


def test_a_hit_imports_neither_triton_nor_torch(place):
    """Nor does the wheel's kernel need what computes the key of the user's cache."""
    write_wheel(place.aot, [SPEC])
    code = f"""
import sys, types
sys.modules["triton"] = sys.modules["torch"] = None
package = types.ModuleType("flashattn")
package.__path__ = [{str(Path(resolve.__file__).parents[1])!r}]
sys.modules["flashattn"] = package
from pathlib import Path
from flashattn import settings
from flashattn.jit.resolve import Resolver
from flashattn.jit.spec import KernelSpec
spec = KernelSpec.from_json({SPEC.to_json()!r})
resolver = Resolver(settings=settings.Settings(), kernels_dir=Path({str(place.kernels)!r}), version={VERSION!r},
                    aot_dir=Path({str(place.aot)!r}))
resolver.resolve(spec)
assert resolver.decision(spec.key).source == "wheel"
assert "filelock" not in sys.modules and "flashattn.jit.compile" not in sys.modules
"""
    subprocess.run([sys.executable, "-c", code], check=True)


def test_the_key_of_the_cache_is_what_the_compiler_publishes_under(place):
    resolver = place.resolver()
    assert resolver.resolve(SPEC).key == artifact_of(SPEC, place.digest, toolchain()).key
    assert [entry.key for entry in place.cache.entries()] == [resolver.decision(SPEC.key).artifact_key]
