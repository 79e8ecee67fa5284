"""UserStore: the kernels compiled on this machine. An entry is one immutable folder, published by one rename."""

from __future__ import annotations

import contextlib
import errno
import os
import re
import time
import uuid
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from . import files, place
from .artifact import Artifact, ArtifactError, dump_meta, parse
from .log import Notices, logger

LAYOUT = "v1"
KINDS = ("cubin", "hsaco")
_KEY = re.compile(r"[0-9a-f]{64}\Z")
_TAKEN = (errno.EEXIST, errno.ENOTEMPTY, errno.ENOTDIR, errno.EISDIR)
_NO_FOLDER = (errno.ENOENT, errno.ENOTDIR, errno.EEXIST)
_UNWRITABLE = (*_NO_FOLDER, errno.EROFS, errno.EACCES, errno.EPERM, errno.ENOSPC, errno.EDQUOT)
# What a network disk says for a moment. Waited for this long between tries, in seconds.
_PASSING = (errno.ESTALE, errno.EBUSY, errno.EAGAIN)
_PAUSES = (0.01, 0.05, 0.1)
# A publisher writes for a moment only, so an unpublished folder of this age in seconds was left by a dead process.
_ABANDONED = 600.0
_TOUCH_EVERY = 3600.0


@dataclass(frozen=True, slots=True)
class StoredEntry:
    """An entry of the cache, unverified: its size in bytes, and when it was last used (seconds since the epoch)."""

    key: str
    folder: Path
    bytes: int
    used: float


def is_key(text: str) -> bool:
    """Whether `text` is a sha256 in hex. Nothing else becomes part of a path."""
    return isinstance(text, str) and bool(_KEY.match(text))


def verified(meta: bytes, code: bytes) -> Artifact:
    """`artifact.parse`, for bytes of any kind: whatever goes wrong is an ArtifactError."""
    try:
        return parse(meta, code)
    except ArtifactError:
        raise
    except Exception as error:
        raise ArtifactError("corrupt", f"its description cannot be used ({type(error).__name__})") from None


class UserStore:
    """${root}/v1/entries/ab/<artifact_key>/{entry.json, kernel.cubin or kernel.hsaco}.

    `root` None keeps nothing. A root that belongs to another user, or that others may write to, is warned of and then
    counts as None. `lock_timeout` is in seconds. No method but `load` raises for what a disk does.
    """

    def __init__(self, root: Path | None, lock_timeout: float = 60.0):
        self.lock_timeout = lock_timeout
        self._notices = Notices()
        complaint = root and (place.distrust(Path(root)) or place.distrust(Path(root) / LAYOUT))
        if complaint:
            self._notices.warn("distrust", f"the cache of compiled kernels is not used: {complaint}")
        self.root = None if complaint or root is None else Path(root)

    @classmethod
    def open(cls, cache_dir: Path | None, lock_timeout: float = 60.0) -> UserStore:
        """The store in `cache_dir` (None: the default place), or in a private temporary folder if that is unusable."""
        root, complaint = place.choose(cache_dir)
        if complaint:
            instead = f"{root} is used instead" if root else "compiled kernels are kept in memory only"
            hint = "set FLASHATTN_CACHE_DIR to a folder of your own to keep them"
            logger.warning("the cache of compiled kernels: %s; %s; %s", complaint, instead, hint)
        return cls(root, lock_timeout)

    # ---- Reading

    def load(self, key: str) -> Artifact | None:
        """The verified artifact, or None where there is none.

        Raises ArtifactError, whose reason is "corrupt", "schema" or "unreadable", for an entry that must not be used.
        """
        folder = self._entry(key)
        if folder is None:
            return None
        for pause in (0.0, *_PAUSES):
            time.sleep(pause)
            try:
                return self._read(key, folder)
            except FileNotFoundError as error:
                # The folder is there and a file is not: not visible yet, being removed, or never written.
                problem = ArtifactError("corrupt", f"{error.filename} is missing")
            except OSError as error:
                link = error.errno == errno.ELOOP
                problem = ArtifactError("corrupt", "a file of it is a link") if link else _unreadable(error)
                if error.errno not in _PASSING:
                    break
        raise problem

    def _read(self, key: str, folder: Path) -> Artifact | None:
        try:
            # All files are read through one descriptor: a folder that is replaced meanwhile is not mixed with its heir.
            fd = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
        except FileNotFoundError:
            return None
        except NotADirectoryError:
            if os.path.lexists(folder):
                raise ArtifactError("corrupt", "it is not a folder") from None
            return None
        try:
            files.check_owner(fd)
            meta = files.read_file(fd, "entry.json")
            kind = next((kind for kind in KINDS if f"kernel.{kind}" in os.listdir(fd)), KINDS[0])
            artifact = verified(meta, files.read_file(fd, f"kernel.{kind}"))
            if artifact.key != key or artifact.meta["kind"] != kind:
                raise ArtifactError("corrupt", "it holds another kernel than its name says")
            with contextlib.suppress(OSError):
                if time.time() - os.fstat(fd).st_mtime > _TOUCH_EVERY:
                    os.utime(fd)
            return artifact
        finally:
            os.close(fd)

    def entries(self) -> Iterator[StoredEntry]:
        """What is in the store, in no order and without reading it."""
        if self.root is None:
            return
        for folder in self._path("entries").glob("*/*"):
            if is_key(folder.name) and folder.parent.name == folder.name[:2]:
                with contextlib.suppress(OSError):
                    facts = folder.lstat()
                    size = sum(path.lstat().st_size for path in folder.iterdir())
                    yield StoredEntry(folder.name, folder, size, facts.st_mtime)

    # ---- Writing

    def publish(self, artifact: Artifact, replace: bool = False) -> bool:
        """Keep `artifact`. A sound entry that is there already stays, unless `replace`. False if nothing was written.

        A disk that does not take it is warned of once.
        """
        if self.root is None:
            return False
        try:
            return self._publish(artifact, replace)
        except OSError as error:
            why = error.strerror or type(error).__name__
            self._notices.warn("write", f"{self.root}: compiled kernels cannot be kept ({why}); they work from memory")
            return False

    def _publish(self, artifact: Artifact, replace: bool) -> bool:
        self._sweep(self._path("tmp"), _ABANDONED)
        temporary = self._path("tmp") / _unique(artifact.key[:12])
        files.make_folder(temporary)
        try:
            files.write_file(temporary / f"kernel.{artifact.meta['kind']}", artifact.code)
            files.write_file(temporary / "entry.json", dump_meta(artifact.meta))
            files.sync_folder(temporary)
            return self._install(temporary, artifact.key, replace)
        finally:
            files.delete(temporary)

    def _install(self, temporary: Path, key: str, replace: bool) -> bool:
        """Make the complete folder `temporary` the entry of `key`."""
        target = self._entry(key)
        files.make_folder(target.parent)
        for pause in (0.0, *_PAUSES):
            time.sleep(pause)
            try:
                os.rename(temporary, target)
                files.sync_folder(target.parent)
                return True
            except OSError as error:
                failure = error
            if failure.errno not in (*_TAKEN, *_PASSING):
                break
            if failure.errno in _TAKEN and not self._make_way(target, key, replace):
                return False
        raise failure

    def _make_way(self, target: Path, key: str, replace: bool) -> bool:
        """Whether another try to publish can help, now that the name `target` was found taken."""
        if replace:
            self._remove(target)
            return True
        try:
            # What is taken and cannot be seen yet is another process's: leave it alone.
            return self.load(key) is None and not os.path.lexists(target)
        except ArtifactError:
            self._move(target, "quarantine")
            return True

    def quarantine(self, key: str) -> bool:
        """Take the entry out of use and keep it for a look. True if it is out of the way afterwards."""
        folder = self._entry(key)
        if folder is None:
            return False
        try:
            self._move(folder, "quarantine")
            return True
        except OSError:
            return False

    def clear(self) -> int:
        """Remove every entry and all that is quarantined or abandoned. Returns the number of entries."""
        removed = [entry for entry in list(self.entries()) if self._removed(entry)]
        if self.root is not None:
            self._sweep(self._path("quarantine"), 0.0)
            self._sweep(self._path("tmp"), _ABANDONED)
        return len(removed)

    def gc(self, max_age: float | None = None, max_bytes: int | None = None) -> list[StoredEntry]:
        """Remove entries unused for `max_age` seconds, then the longest unused until `max_bytes` hold the rest.

        Returns what was removed. Safe while other processes read: to them an entry is whole or absent.
        """
        now, kept, removed = time.time(), 0, []
        for entry in sorted(self.entries(), key=lambda entry: entry.used, reverse=True):
            old = max_age is not None and now - entry.used > max_age
            if (old or (max_bytes is not None and kept + entry.bytes > max_bytes)) and self._removed(entry):
                removed.append(entry)
            else:
                kept += entry.bytes
        if self.root is not None:
            self._sweep(self._path("tmp"), _ABANDONED)
            self._sweep(self._path("quarantine"), _ABANDONED if max_age is None else max_age)
        return removed

    def _removed(self, entry: StoredEntry) -> bool:
        try:
            self._remove(entry.folder)
            return True
        except OSError:
            return False

    def _remove(self, folder: Path) -> None:
        grave = self._move(folder, "tmp")
        if grave is not None:
            files.delete(grave)

    def _move(self, folder: Path, place: str) -> Path | None:
        """Take `folder` out of use by one rename, so that no reader sees half of it. None if it was gone already."""
        goal = self._path(place) / _unique(folder.name)
        files.make_folder(goal.parent)
        try:
            os.rename(folder, goal)
        except FileNotFoundError:
            return None
        # Its age counts from now on.
        with contextlib.suppress(OSError):
            os.utime(goal, follow_symlinks=False)
        return goal

    def _sweep(self, parent: Path, age: float) -> None:
        """Delete what is in `parent` and older than `age` seconds."""
        with contextlib.suppress(OSError):
            for path in parent.iterdir():
                with contextlib.suppress(OSError):
                    if time.time() - path.lstat().st_mtime >= age:
                        files.delete(path)

    # ---- Locking

    @contextlib.contextmanager
    def lock(self, key: str) -> Iterator[bool]:
        """Keep other processes from doing the same work meanwhile; yields whether it is held.

        It saves work and no more: where it cannot be had in time, or at all, the caller goes on without it.
        """
        held = self._acquire(key)
        try:
            yield held is not None
        finally:
            if held is not None:
                # A lock that cannot be let go ends with this process, and others wait for it no longer than they want.
                with contextlib.suppress(Exception):
                    held.release()

    def _acquire(self, key: str):
        if self.root is None or not is_key(key):
            return None
        try:
            import filelock

            folder = self._path("locks")
            files.make_folder(folder)
            lock = filelock.FileLock(str(folder / f"{key[:32]}.lock"), thread_local=False)
            try:
                lock.acquire(timeout=0)
            except filelock.Timeout:
                logger.info("another process is compiling the same kernel; waiting %g s for it", self.lock_timeout)
                lock.acquire(timeout=self.lock_timeout)
            return lock
        except TimeoutError:
            text = f"a kernel was locked by another process for {self.lock_timeout:g} s: it is compiled here as well"
            self._notices.warn("timeout", text)
        except Exception as error:
            # Whatever is wrong with the lock, the kernel can be compiled. `publish` tells of a full disk.
            if getattr(error, "errno", None) not in _UNWRITABLE:
                self._notices.warn("lock", f"{self.root} cannot be locked ({error}); work may be done twice")
        return None

    # ---- Paths

    def _path(self, name: str) -> Path:
        return self.root / LAYOUT / name

    def _entry(self, key: str) -> Path | None:
        if self.root is None:
            return None
        if not is_key(key):
            raise ValueError(f"the key of an artifact is 64 hex digits, got {key!r}")
        return self._path("entries") / key[:2] / key


def _unique(name: str) -> str:
    return f"{name}.{int(time.time())}.{uuid.uuid4().hex[:12]}"


def _unreadable(error: OSError) -> ArtifactError:
    return ArtifactError("unreadable", f"it cannot be read ({error.strerror})")
