"""The user's cache on a sound disk: what is kept, found, replaced and removed, and by whom."""

from __future__ import annotations

import itertools
import os
import random
import shutil
import threading
import time
from pathlib import Path

import pytest
from store_worker import Worker
from stub_compiler import artifact_of, spec, write_sources

from flashattn.jit import files
from flashattn.jit.artifact import Artifact, dump_meta
from flashattn.jit.spec import sha256
from flashattn.jit.store import UserStore

DIGEST = "d" * 64
DAY = 86400.0


@pytest.fixture
def store(tmp_path):
    return UserStore(tmp_path / "cache")


def kept(store, *factors):
    """Artifacts for `factors`, published in `store`."""
    artifacts = [artifact_of(spec(factor), DIGEST) for factor in factors]
    assert all(store.publish(artifact) for artifact in artifacts)
    return artifacts


def age(store, artifact, seconds):
    then = time.time() - seconds
    os.utime(folder_of(store, artifact), (then, then))


def folder_of(store, artifact) -> Path:
    return store.root / "v1" / "entries" / artifact.key[:2] / artifact.key


def test_what_is_published_is_found_and_nothing_else(store):
    (artifact,) = kept(store, 2)
    assert store.load(artifact.key) == artifact
    assert store.load(artifact_of(spec(3), DIGEST).key) is None
    assert sorted(path.name for path in folder_of(store, artifact).iterdir()) == ["entry.json", "kernel.cubin"]


def test_a_kernel_for_amd_is_kept_under_its_own_name(store):
    artifact = artifact_of(spec(target="gfx942"), DIGEST)
    store.publish(artifact)
    assert store.load(artifact.key) == artifact
    assert (folder_of(store, artifact) / "kernel.hsaco").read_bytes() == artifact.code


def test_looking_for_a_kernel_writes_nothing(store):
    assert store.load("a" * 64) is None
    assert list(store.entries()) == []
    assert not store.root.exists()


def test_nothing_is_left_beside_the_entries(store):
    kept(store, 2, 3)
    assert list((store.root / "v1" / "tmp").iterdir()) == []
    assert sorted(path.name for path in (store.root / "v1").iterdir()) == ["entries", "tmp"]


def test_the_folders_are_for_their_user_alone(store):
    (artifact,) = kept(store, 2)
    for folder in (store.root, store.root / "v1", folder_of(store, artifact)):
        assert folder.stat().st_mode & 0o777 == 0o700


def test_a_sound_entry_stays_unless_it_is_to_be_replaced(store):
    (first,) = kept(store, 2)
    other = artifact_of(spec(2), DIGEST, name="other")
    assert not store.publish(other)
    assert store.load(first.key) == first
    assert store.publish(other, replace=True)
    assert store.load(first.key) == other
    assert list((store.root / "v1" / "tmp").iterdir()) == []


def test_no_store_keeps_nothing_and_complains_of_nothing(caplog):
    store = UserStore(None)
    artifact = artifact_of(spec(), DIGEST)
    assert not store.publish(artifact)
    assert store.load(artifact.key) is None
    assert (list(store.entries()), store.clear(), store.gc(0), store.quarantine(artifact.key)) == ([], 0, [], False)
    with store.lock(artifact.key) as held:
        assert not held
    assert caplog.messages == []


@pytest.mark.parametrize("key", ["", "../" * 21 + "x", "a" * 63, "a" * 65, "A" * 64, "g" * 64, "a" * 63 + "\n", None])
def test_only_a_sha256_becomes_a_path(store, key):
    with pytest.raises(ValueError, match="64 hex digits"):
        store.load(key)
    with pytest.raises(ValueError, match="64 hex digits"):
        store.quarantine(key)


def test_the_current_folder_is_never_looked_at(store, tmp_path, monkeypatch):
    (artifact,) = kept(store, 2)
    monkeypatch.chdir(store.root)
    assert UserStore(tmp_path / "elsewhere").load(artifact.key) is None
    assert UserStore(None).load(artifact.key) is None


def test_every_file_name_fits_an_encrypted_home(store):
    """eCryptfs allows 143 bytes."""
    artifact, damaged = kept(store, 2, 3)
    with store.lock(artifact.key):
        store.quarantine(damaged.key)
        names = [path.name for path in store.root.rglob("*")]
    assert max(len(os.fsencode(name)) for name in names) <= 143


def test_a_long_and_strange_path_works(tmp_path):
    store = UserStore(tmp_path / ("ünï %s {x} " * 10) / ("d" * 200))
    (artifact,) = kept(store, 2)
    assert store.load(artifact.key) == artifact


def test_a_cache_can_be_moved(store, tmp_path):
    (artifact,) = kept(store, 2)
    moved = store.root.rename(tmp_path / "moved")
    copied = shutil.copytree(moved, tmp_path / "copied")
    assert UserStore(moved).load(artifact.key) == UserStore(copied).load(artifact.key) == artifact


def test_a_cache_may_be_reached_through_a_link(store, tmp_path):
    (artifact,) = kept(store, 2)
    (tmp_path / "link").symlink_to(store.root)
    assert UserStore(tmp_path / "link").load(artifact.key) == artifact


def test_two_versions_share_a_cache(store):
    """Other sources give another key, so neither sees or removes the other's kernels."""
    old, new = artifact_of(spec(), "a" * 64), artifact_of(spec(), "b" * 64)
    assert store.publish(old)
    assert store.load(new.key) is None
    assert store.publish(new)
    assert (store.load(old.key), store.load(new.key)) == (old, new)


def test_the_entries_are_listed_with_size_and_last_use(store):
    artifact, other = kept(store, 2, 3)
    age(store, artifact, 2 * DAY)
    (store.root / "v1" / "entries" / "notes.txt").write_text("no entry")
    (store.root / "v1" / "entries" / "ab").mkdir(exist_ok=True)
    (store.root / "v1" / "entries" / "ab" / "stray").mkdir()
    listed = {entry.key: entry for entry in store.entries()}
    assert set(listed) == {artifact.key, other.key}
    assert listed[artifact.key].bytes == len(artifact.code) + len(dump_meta(artifact.meta))
    assert time.time() - listed[artifact.key].used > DAY > time.time() - listed[other.key].used


def test_use_makes_an_entry_young(store):
    (artifact,) = kept(store, 2)
    age(store, artifact, 30 * DAY)
    store.load(artifact.key)
    assert store.gc(max_age=DAY) == []


def test_gc_removes_what_was_not_used_for_long(store):
    old, young = kept(store, 2, 3)
    age(store, old, 2 * DAY)
    assert [entry.key for entry in store.gc(max_age=DAY)] == [old.key]
    assert (store.load(old.key), store.load(young.key)) == (None, young)


def test_gc_removes_the_longest_unused_until_the_rest_fits(store):
    artifacts = kept(store, 2, 3, 4)
    for days, artifact in enumerate(artifacts, 1):
        age(store, artifact, days * DAY)
    size = max(entry.bytes for entry in store.entries())
    removed = store.gc(max_bytes=2 * size)
    assert [entry.key for entry in removed] == [artifacts[2].key]
    assert len(store.gc(max_bytes=0)) == 2
    assert list((store.root / "v1" / "tmp").iterdir()) == []


def test_clear_removes_all_of_it(store):
    kept(store, 2, 3)
    (damaged,) = kept(store, 4)
    store.quarantine(damaged.key)
    assert store.clear() == 2
    assert [path for path in store.root.rglob("*") if path.is_file()] == []


def test_what_a_dead_process_left_is_swept_once_it_is_old(store):
    young, old = (store.root / "v1" / "tmp" / name for name in ("young", "old"))
    for folder in (young, old):
        folder.mkdir(parents=True)
        (folder / "kernel.cubin").write_bytes(b"half")
    then = time.time() - DAY
    os.utime(old, (then, then))
    kept(store, 2)
    assert young.exists()
    assert not old.exists()


def test_a_reader_sees_an_entry_whole_or_not_at_all(store):
    """While others replace, remove and publish it."""
    artifacts = [artifact_of(spec(2), DIGEST, name=name) for name in ("one", "other")]
    stop = threading.Event()

    def disturb():
        mine = UserStore(store.root)
        for artifact in itertools.cycle(artifacts):
            if stop.is_set():
                return
            mine.publish(artifact, replace=True)
            mine.publish(artifacts[0], replace=True)
            mine.gc(max_bytes=0)

    writers = [threading.Thread(target=disturb) for _ in range(2)]
    for writer in writers:
        writer.start()
    whole = 0
    try:
        for _ in range(100_000):
            found = store.load(artifacts[0].key)
            assert found is None or found in artifacts
            whole += found is not None
            if whole == 100:
                break
    finally:
        stop.set()
        for writer in writers:
            writer.join()
    assert whole == 100


def test_an_entry_that_is_replaced_while_it_is_read_is_not_mixed_with_its_heir(store, monkeypatch):
    (old,) = kept(store, 2)
    heir = artifact_of(spec(2), DIGEST, name="heir", code_sha256=sha256(b"other"), code_bytes=5)
    heir = Artifact(b"other", heir.meta)
    read_file, names = files.read_file, []

    def read_and_replace(folder, name):
        content = read_file(folder, name)
        if not names:
            UserStore(store.root).publish(heir, replace=True)
        names.append(name)
        return content

    monkeypatch.setattr(files, "read_file", read_and_replace)
    assert store.load(old.key) == heir
    assert names == ["entry.json", "entry.json", "kernel.cubin"]


def test_16_processes_compile_each_of_8_kernels_once_in_each_of_5_rounds(tmp_path):
    kernels = write_sources(tmp_path / "kernels")
    workers = [Worker() for _ in range(16)]
    for worker in workers:
        worker.ask(cache_dir=str(tmp_path / "first"), kernels_dir=str(kernels), factors=[])
    for turn in range(5):
        log, cache = tmp_path / f"{turn}.log", tmp_path / f"cache {turn}"
        for number, worker in enumerate(workers):
            factors = random.Random(number).sample(range(2, 10), 8)
            command = {"cache_dir": str(cache), "kernels_dir": str(kernels), "log": str(log), "factors": factors}
            worker.tell(builder="slow", **command)
        answers = [worker.hear() for worker in workers]
        built = log.read_text().split()
        assert sorted(built) == sorted(spec(factor).key for factor in range(2, 10))
        assert sum(answer["compiles"] for answer in answers) == 8
        assert {frozenset(answer["codes"]) for answer in answers} == {frozenset(answers[0]["codes"])}
        store = UserStore(cache)
        assert len([store.load(entry.key) for entry in store.entries()]) == 8
        assert list((cache / "v1" / "tmp").iterdir()) == []
    printed = "".join(worker.end() for worker in workers)
    assert "waiting" in printed
    assert {line.split()[1] for line in printed.splitlines()} == {"another", "compiling", "compiled"}
