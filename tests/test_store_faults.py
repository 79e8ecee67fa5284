"""The user's cache when the disk, another process, another user or a bit goes wrong: a kernel is right or absent."""

from __future__ import annotations

import contextlib
import errno
import json
import os
import resource
import shutil
import signal
import subprocess
import time
from pathlib import Path

import pytest
from store_worker import Worker
from stub_compiler import artifact_of, spec, write_sources

from flashattn.jit import files, place, store
from flashattn.jit.artifact import ArtifactError, dump_meta
from flashattn.jit.store import UserStore

DIGEST = "d" * 64
FILES = ("entry.json", "kernel.cubin")
STRANGER = 12345

as_root = pytest.mark.skipif(os.geteuid() != 0, reason="only root can give a folder to another user or become one")


@pytest.fixture
def cache(tmp_path):
    return UserStore(tmp_path / "cache", lock_timeout=0.05)


@pytest.fixture
def artifact(cache):
    artifact = artifact_of(spec(), DIGEST)
    assert cache.publish(artifact)
    return artifact


@pytest.fixture
def kernels(tmp_path):
    return str(write_sources(tmp_path / "kernels"))


@pytest.fixture
def shared_folder(tmp_path):
    """A folder that any user can reach; pytest's own is root's alone."""
    folder = Path("/tmp") / f"flashattn-test-{os.getpid()}-{time.monotonic_ns()}"
    folder.mkdir(mode=0o755)
    folder.chmod(0o755)
    yield folder
    shutil.rmtree(folder)


def folder_of(cache, artifact) -> Path:
    return cache.root / "v1" / "entries" / artifact.key[:2] / artifact.key


def leftovers(cache) -> list[Path]:
    return list((cache.root / "v1" / "tmp").iterdir())


def assert_repaired(cache, artifact, reasons=("corrupt",)):
    """The entry is refused, then replaced by publishing it again."""
    with pytest.raises(ArtifactError) as refused:
        cache.load(artifact.key)
    assert refused.value.reason in reasons
    assert cache.publish(artifact)
    assert cache.load(artifact.key) == artifact


# ---- Bits


@pytest.mark.parametrize("name", FILES)
def test_no_flipped_bit_goes_unnoticed(cache, artifact, name):
    path = folder_of(cache, artifact) / name
    sound = path.read_bytes()
    for position in range(0, len(sound), 7):
        damaged = bytearray(sound)
        damaged[position] ^= 1 << position % 8
        path.write_bytes(damaged)
        with pytest.raises(ArtifactError):
            cache.load(artifact.key)
    path.write_bytes(sound)
    assert cache.load(artifact.key) == artifact


@pytest.mark.parametrize("length", [0, 0.5, 0.999], ids=["empty", "half", "all but the end"])
@pytest.mark.parametrize("name", FILES)
def test_a_cut_file_is_refused_and_replaced(cache, artifact, name, length):
    path = folder_of(cache, artifact) / name
    path.write_bytes(path.read_bytes()[: int(len(path.read_bytes()) * length)])
    assert_repaired(cache, artifact)


@pytest.mark.parametrize("name", FILES)
@pytest.mark.parametrize("what", ["nothing", "a folder", "a dangling link", "a link to the file", "a pipe", "bytes"])
def test_what_is_no_file_of_the_entry_is_refused_and_replaced(cache, artifact, name, what):
    path = folder_of(cache, artifact) / name
    sound = path.rename(cache.root / name)
    make = {
        "nothing": lambda: None,
        "a folder": path.mkdir,
        "a dangling link": lambda: path.symlink_to("nowhere"),
        "a link to the file": lambda: path.symlink_to(sound),
        "a pipe": lambda: os.mkfifo(path),
        "bytes": lambda: path.write_bytes(b"\xff\xfe\x80{"),
    }
    make[what]()
    assert_repaired(cache, artifact)


@pytest.mark.parametrize("text", ["[]", "{}", "null", "1" * 5000, "[" * 100000, '{"schema": NaN, "self_sha256": ""}'])
def test_no_json_makes_loading_crash(cache, artifact, text):
    (folder_of(cache, artifact) / "entry.json").write_text(text)
    assert_repaired(cache, artifact)


def test_a_pickle_is_only_bytes(cache, artifact, tmp_path):
    payload = f"cos\nsystem\n(S'touch {tmp_path / 'pwned'}'\ntR.".encode()
    for name in FILES:
        (folder_of(cache, artifact) / name).write_bytes(payload)
    assert_repaired(cache, artifact)
    assert not (tmp_path / "pwned").exists()


def test_an_entry_of_another_schema_is_refused_as_such(cache, artifact):
    changed = {**artifact.meta, "schema": 99}
    (folder_of(cache, artifact) / "entry.json").write_bytes(dump_meta(changed))
    assert_repaired(cache, artifact, reasons=("schema",))


def test_the_code_of_one_kernel_with_the_description_of_another_is_refused(cache, artifact):
    other = artifact_of(spec(3), DIGEST)
    cache.publish(other)
    shutil.copy(folder_of(cache, other) / "entry.json", folder_of(cache, artifact))
    assert_repaired(cache, artifact)
    shutil.copy(folder_of(cache, other) / "kernel.cubin", folder_of(cache, artifact))
    assert_repaired(cache, artifact)


def test_a_sound_entry_under_the_name_of_another_is_refused(cache, artifact):
    other = artifact_of(spec(3), DIGEST)
    cache.publish(other)
    shutil.rmtree(folder_of(cache, artifact))
    shutil.copytree(folder_of(cache, other), folder_of(cache, artifact))
    assert_repaired(cache, artifact)


@pytest.mark.parametrize("what", ["an empty folder", "a stray file", "a file", "a link to an entry"])
def test_what_lies_in_the_place_of_an_entry_is_replaced(cache, artifact, what):
    folder = folder_of(cache, artifact)
    moved = folder.rename(cache.root / "moved")
    if what == "a file":
        folder.write_text("no entry")
    elif what == "a link to an entry":
        folder.symlink_to(moved)
    else:
        folder.mkdir()
        if what == "a stray file":
            (folder / "stray").write_text("")
    assert_repaired(cache, artifact)


def test_a_damaged_entry_is_kept_aside_for_a_look(cache, artifact):
    (folder_of(cache, artifact) / "kernel.cubin").write_bytes(b"")
    assert cache.quarantine(artifact.key)
    assert cache.load(artifact.key) is None
    (aside,) = (cache.root / "v1" / "quarantine").iterdir()
    assert (aside / "kernel.cubin").exists()
    cache.gc(max_age=0.0)
    assert not aside.exists()


# ---- Killed processes


def hold(worker, cache, kernels):
    """Make `worker` compile, and return once it is in the middle of it."""
    worker.tell(cache_dir=str(cache.root), kernels_dir=kernels, factors=[2], builder="hold")
    assert worker.hear() == {"building": spec(2).key}


def wait_for_line(worker, part):
    """Read what `worker` prints to stderr up to a line with `part`."""
    for line in worker.process.stderr:
        if part in line:
            return
    raise EOFError(f"{part!r} was not printed")


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM, signal.SIGINT])
def test_who_waits_for_a_compile_that_is_killed_takes_over(cache, kernels, number):
    builder, waiter = Worker(), Worker()
    hold(builder, cache, kernels)
    waiter.tell(cache_dir=str(cache.root), kernels_dir=kernels, factors=[2])
    wait_for_line(waiter, "another process is compiling the same kernel")
    builder.process.send_signal(number)
    assert waiter.hear()["compiles"] == 1
    builder.end()
    waiter.end()
    assert builder.process.returncode != 0
    assert len(list(cache.entries())) == 1
    assert leftovers(cache) == []


def test_a_process_that_is_killed_while_it_writes_leaves_no_entry(cache, kernels):
    worker = Worker()
    worker.tell(cache_dir=str(cache.root), kernels_dir=kernels, factors=[2], builder="die publishing")
    with pytest.raises(EOFError, match="exit status -9"):
        worker.hear()
    assert list(cache.entries()) == []
    (left,) = leftovers(cache)
    then = time.time() - 3600
    os.utime(left, (then, then))
    next_one = Worker()
    assert next_one.ask(cache_dir=str(cache.root), kernels_dir=kernels, factors=[2])["compiles"] == 1
    next_one.end()
    assert leftovers(cache) == []


def test_a_holder_of_the_lock_that_hangs_is_not_waited_for_longer_than_the_timeout(cache, kernels):
    holder, other = Worker(), Worker()
    hold(holder, cache, kernels)
    holder.process.send_signal(signal.SIGSTOP)
    answer = other.ask(cache_dir=str(cache.root), kernels_dir=kernels, factors=[2], lock_timeout=0.05)
    assert answer["compiles"] == 1
    assert other.end().count("locked by another process for 0.05 s: it is compiled here as well") == 1
    assert len(list(cache.entries())) == 1
    holder.process.send_signal(signal.SIGCONT)
    holder.tell()
    assert holder.hear()["compiles"] == 1
    holder.end()


# ---- Disks that are full, read-only or far away


@contextlib.contextmanager
def tmpfs(folder: Path):
    """A disk of one page, which an artifact does not fit in."""
    folder.mkdir()
    command = ["mount", "-t", "tmpfs", "-o", "size=4k,mode=0700", "none", str(folder)]
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=False)
    except FileNotFoundError:
        pytest.skip("there is no `mount` here; a limit on the size of files stands in for a full disk")
    if done.returncode:
        pytest.skip(f"a small disk cannot be mounted here ({done.stderr.strip()}); a limit on files stands in for it")
    try:
        yield folder
    finally:
        subprocess.run(["umount", str(folder)], check=True)


def assert_not_kept_and_told_once(cache, caplog, why):
    artifacts = [artifact_of(spec(factor), DIGEST) for factor in (2, 3)]
    caplog.clear()
    assert [cache.publish(artifact) for artifact in artifacts] == [False, False]
    assert [cache.load(artifact.key) for artifact in artifacts] == [None, None]
    assert caplog.messages == [f"{cache.root}: compiled kernels cannot be kept ({why}); they work from memory"]


def test_a_full_disk_keeps_nothing_by_halves(tmp_path, caplog):
    with tmpfs(tmp_path / "small") as folder:
        (folder / "filling").write_bytes(b"x" * 4096)
        assert_not_kept_and_told_once(UserStore(folder), caplog, os.strerror(errno.ENOSPC))
        assert [path for path in folder.rglob("*") if path.is_file()] == [folder / "filling"]


def test_a_limit_on_the_size_of_files_keeps_nothing_by_halves(cache, caplog):
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (100, hard))
    try:
        assert_not_kept_and_told_once(cache, caplog, os.strerror(errno.EFBIG))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert leftovers(cache) == []


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EDQUOT, errno.EIO])
def test_a_write_that_fails_half_way_keeps_nothing(cache, caplog, monkeypatch, number):
    def write_half(path, content):
        path.write_bytes(content[: len(content) // 2])
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(files, "write_file", write_half)
    assert_not_kept_and_told_once(cache, caplog, os.strerror(number))
    assert leftovers(cache) == []


@pytest.mark.parametrize("root", ["/proc/nope", "/dev/null/nope", "a file"])
def test_a_root_that_cannot_be_made_keeps_nothing(tmp_path, root, caplog):
    if root == "a file":
        (tmp_path / "file").write_text("")
        root = tmp_path / "file" / "below"
    artifact = artifact_of(spec(), DIGEST)
    cache = UserStore(Path(root))
    with cache.lock(artifact.key) as held:
        assert not held
        assert not cache.publish(artifact)
    assert cache.load(artifact.key) is None
    assert len(caplog.messages) == 1


class Failing:
    """A function that raises OSError(number) the first `times` times."""

    def __init__(self, function, number, times):
        self.function, self.number, self.left = function, number, times

    def __call__(self, *args, **kwargs):
        if self.left:
            self.left -= 1
            raise OSError(self.number, os.strerror(self.number), "a file")
        return self.function(*args, **kwargs)


@pytest.fixture
def fail(monkeypatch):
    """fail("rename", errno.EBUSY, 2): the next two calls of os.rename by the store raise it."""
    monkeypatch.setattr(store.time, "sleep", lambda seconds: None)

    def fail(name, number, times):
        monkeypatch.setattr(os, name, Failing(getattr(os, name), number, times))

    return fail


@pytest.mark.parametrize("number", [errno.ESTALE, errno.EBUSY])
@pytest.mark.parametrize("name", ["rename", "open"])
def test_what_a_network_disk_says_for_a_moment_does_no_harm(cache, fail, name, number, caplog):
    artifact = artifact_of(spec(), DIGEST)
    if name == "rename":
        fail(name, number, 2)
    assert cache.publish(artifact)
    if name == "open":
        fail(name, number, 2)
    assert cache.load(artifact.key) == artifact
    assert caplog.messages == []


@pytest.mark.parametrize("number", [errno.ESTALE, errno.EBUSY, errno.EXDEV])
def test_a_rename_that_always_fails_is_told_once(cache, fail, number, caplog):
    fail("rename", number, 1000)
    assert_not_kept_and_told_once(cache, caplog, os.strerror(number))
    assert leftovers(cache) == []


@pytest.mark.parametrize("number", [errno.ESTALE, errno.EIO, errno.EMFILE, errno.EACCES])
def test_an_entry_that_cannot_be_read_is_refused_and_stays(cache, artifact, fail, number, monkeypatch):
    with monkeypatch.context():
        fail("open", number, 1000)
        with pytest.raises(ArtifactError, match=os.strerror(number)) as refused:
            cache.load(artifact.key)
    assert refused.value.reason == "unreadable"
    monkeypatch.undo()
    assert cache.load(artifact.key) == artifact


def test_a_file_that_becomes_visible_late_is_waited_for(cache, artifact, monkeypatch):
    path = folder_of(cache, artifact) / "entry.json"
    hidden = path.rename(cache.root / "hidden")
    monkeypatch.setattr(store.time, "sleep", lambda seconds: seconds and hidden.exists() and hidden.rename(path))
    assert cache.load(artifact.key) == artifact


def test_an_entry_of_another_process_that_is_not_visible_yet_is_left_alone(cache, artifact, monkeypatch, caplog):
    monkeypatch.setattr(cache, "load", lambda key: None)
    before = folder_of(cache, artifact).stat().st_ino
    assert not cache.publish(artifact)
    assert folder_of(cache, artifact).stat().st_ino == before
    assert caplog.messages == []


@pytest.mark.parametrize("number", [errno.ENOLCK, errno.EIO, errno.EOPNOTSUPP])
def test_a_disk_without_locks_works_and_is_told_once(cache, monkeypatch, number, caplog):
    import filelock

    def broken(self, *args, **kwargs):
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(filelock.FileLock, "acquire", broken)
    for _ in range(2):
        with cache.lock("a" * 64) as held:
            assert not held
    assert caplog.messages == [
        f"{cache.root} cannot be locked ([Errno {number}] {os.strerror(number)}); work may be done twice"
    ]


def test_a_lock_that_cannot_be_let_go_does_no_harm(cache, monkeypatch):
    import filelock

    def broken(self, *args, **kwargs):
        raise OSError(errno.ENOLCK, "no locks")

    with cache.lock("a" * 64) as held:
        assert held
        monkeypatch.setattr(filelock.FileLock, "release", broken)


def test_an_interrupt_is_not_swallowed_by_the_lock(cache):
    with pytest.raises(KeyboardInterrupt), cache.lock("a" * 64):
        raise KeyboardInterrupt
    with cache.lock("a" * 64) as held:
        assert held


# ---- Other users


@pytest.mark.parametrize("mode", [0o777, 0o775, 0o757])
def test_a_folder_that_others_may_write_to_is_not_used(tmp_path, mode, caplog):
    root = tmp_path / "open"
    cache = UserStore(root)
    artifact = artifact_of(spec(), DIGEST)
    cache.publish(artifact)
    root.chmod(mode)
    distrusting = UserStore(root)
    assert distrusting.root is None
    assert distrusting.load(artifact.key) is None
    assert not distrusting.publish(artifact)
    assert caplog.messages == [
        f"the cache of compiled kernels is not used: others may write to {root} (mode {mode:04o}); "
        "`chmod go-w` makes it usable"
    ]
    root.chmod(0o755)
    assert UserStore(root).load(artifact.key) == artifact


@as_root
@pytest.mark.parametrize("part", ["", "v1", "link"])
def test_a_folder_of_another_user_is_not_used(tmp_path, part, caplog):
    root = tmp_path / "cache"
    cache = UserStore(root)
    artifact = artifact_of(spec(), DIGEST)
    cache.publish(artifact)
    os.chown(root / part.replace("link", ""), STRANGER, STRANGER)
    if part == "link":
        (tmp_path / "link").symlink_to(root)
        root = tmp_path / "link"
    assert UserStore(root).load(artifact.key) is None
    assert f"belongs to another user (uid {STRANGER}, this process has 0)" in caplog.text


@as_root
@pytest.mark.parametrize("name", ["", *FILES])
def test_an_entry_of_another_user_is_refused(cache, artifact, name):
    os.chown(folder_of(cache, artifact) / name, STRANGER, STRANGER)
    assert_repaired(cache, artifact, reasons=("unreadable",))


@as_root
def test_an_entry_that_only_root_can_read_is_replaced(shared_folder, kernels):
    root = shared_folder / "cache"
    sources = str(write_sources(shared_folder / "kernels"))
    worker = Worker(STRANGER)
    root.mkdir(mode=0o700)
    os.chown(root, STRANGER, STRANGER)
    command = {"cache_dir": str(root), "kernels_dir": sources, "factors": [2]}
    assert worker.ask(**command)["compiles"] == 1
    for path in root.rglob("entry.json"):
        path.chmod(0o600)
        os.chown(path, 0, 0)
    assert [worker.ask(**command)["sources"] for _ in range(2)] == [["compiled"], ["user cache"]]
    assert "(unreadable: it cannot be read (Permission denied))" in worker.end()


@as_root
def test_a_read_only_cache_is_read_and_not_complained_of_until_something_is_new(shared_folder):
    root, sources = shared_folder / "cache", str(write_sources(shared_folder / "kernels"))
    root.mkdir(mode=0o700)
    os.chown(root, STRANGER, STRANGER)
    worker = Worker(STRANGER)
    worker.ask(cache_dir=str(root), kernels_dir=sources, factors=[2])
    worker.end()
    for path in (root, *root.rglob("*")):
        path.chmod(0o500)
    reader = Worker(STRANGER)
    assert reader.ask(cache_dir=str(root), kernels_dir=sources, factors=[2])["sources"] == ["user cache"]
    assert reader.ask(cache_dir=str(root), kernels_dir=sources, factors=[3, 4])["sources"] == ["compiled"] * 2
    printed = reader.end()
    assert printed.count("compiled kernels cannot be kept (Permission denied)") == 1
    assert "locked" not in printed


# ---- No place to keep anything


def homeless(home: str | None, **environ) -> dict[str, str]:
    return {**({} if home is None else {"HOME": home}), **environ}


@pytest.fixture
def temporary(tmp_path, monkeypatch):
    """The only temporary folder there is."""
    monkeypatch.setattr(place, "_TEMPORARY", ())
    (tmp_path / "tmp").mkdir(mode=0o1777)
    (tmp_path / "tmp").chmod(0o1777)
    return tmp_path / "tmp"


@pytest.mark.parametrize("home", [None, "", "/", "//", "relative", "/nonexistent/home"])
def test_without_a_home_a_private_temporary_folder_is_used(temporary, home):
    root, complaint = place.choose(None, homeless(home, TMPDIR=str(temporary)))
    assert root == temporary / f"flashattn-{os.geteuid()}"
    assert root.stat().st_mode & 0o777 == 0o700
    assert complaint == "there is no home folder (HOME)"
    assert place.choose(None, homeless(home, TMPDIR=str(temporary)))[0] == root


def test_the_default_place_follows_xdg_and_home(tmp_path):
    home = str(tmp_path)
    assert place.choose(None, {"HOME": home}) == (tmp_path / ".cache" / "flashattn", None)
    assert place.choose(None, {"HOME": "/", "XDG_CACHE_HOME": f"{home}/x"}) == (tmp_path / "x" / "flashattn", None)
    # A relative XDG_CACHE_HOME would be a folder in the current one.
    assert place.choose(None, {"HOME": home, "XDG_CACHE_HOME": "x"})[0] == tmp_path / ".cache" / "flashattn"
    assert place.choose(tmp_path / "given", {}) == (tmp_path / "given", None)


@pytest.mark.parametrize("what", ["a link", "a file", "a mode", pytest.param("an owner", marks=as_root)])
def test_a_temporary_folder_that_somebody_else_could_have_made_is_not_used(temporary, what, tmp_path):
    folder = temporary / f"flashattn-{os.geteuid()}"
    if what == "a link":
        (tmp_path / "other").mkdir(mode=0o700)
        folder.symlink_to(tmp_path / "other")
    elif what == "a file":
        folder.write_text("")
    else:
        folder.mkdir(mode=0o700)
        folder.chmod(0o750 if what == "a mode" else 0o700)
    if what == "an owner":
        os.chown(folder, STRANGER, STRANGER)
    assert place.choose(None, {"TMPDIR": str(temporary)})[0] is None


def test_a_temporary_folder_in_which_others_can_rename_is_not_used(temporary):
    temporary.chmod(0o777)
    assert place.private_temporary({"TMPDIR": str(temporary)}) is None


def test_a_place_that_cannot_be_used_is_told_with_what_is_used_instead(temporary, tmp_path, monkeypatch, caplog):
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("TMPDIR", str(temporary))
    chosen = UserStore.open(tmp_path / "file")
    assert chosen.root == temporary / f"flashattn-{os.geteuid()}"
    monkeypatch.setenv("TMPDIR", "")
    assert UserStore.open(tmp_path / "file").root is None
    start, end = f"the cache of compiled kernels: {tmp_path / 'file'} is not a folder", "of your own to keep them"
    instead = f"{chosen.root} is used instead", "compiled kernels are kept in memory only"
    assert caplog.messages == [f"{start}; {each}; set FLASHATTN_CACHE_DIR to a folder {end}" for each in instead]


@as_root
def test_a_user_that_nobody_knows_and_that_has_no_home_works(kernels, shared_folder):
    sources = str(write_sources(shared_folder / "kernels"))
    temporary = shared_folder / "tmp"
    temporary.mkdir()
    temporary.chmod(0o1777)
    worker = Worker(STRANGER, HOME="/", XDG_CACHE_HOME="", TMPDIR=str(temporary))
    commands = {"kernels_dir": sources, "factors": [2]}
    assert [worker.ask(**commands)["sources"] for _ in range(2)] == [["compiled"], ["user cache"]]
    assert (temporary / f"flashattn-{STRANGER}").stat().st_uid == STRANGER
    assert "there is no home folder (HOME)" in worker.end()


def test_the_meta_of_an_entry_is_json_that_a_person_can_read(cache, artifact):
    described = json.loads((folder_of(cache, artifact) / "entry.json").read_text())
    assert described["name"] == "scale"
    assert described["toolchain"] == artifact.meta["toolchain"]
