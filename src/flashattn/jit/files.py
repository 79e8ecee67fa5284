"""File operations of the user's cache: folders for this user alone, files of this user's only, synced writes."""

from __future__ import annotations

import contextlib
import os
import shutil
import stat
from pathlib import Path

from .artifact import ArtifactError


def make_folder(folder: Path) -> None:
    """`folder`, and each parent that is missing, for this user alone."""
    if not folder.is_dir():
        make_folder(folder.parent)
        try:
            os.mkdir(folder, 0o700)
        except FileExistsError:
            if not folder.is_dir():
                raise


def delete(path: Path) -> None:
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path, ignore_errors=True)
    else:
        path.unlink(missing_ok=True)


def check_owner(fd: int) -> os.stat_result:
    facts = os.fstat(fd)
    if facts.st_uid != os.geteuid():
        raise ArtifactError("unreadable", f"it belongs to another user (uid {facts.st_uid})")
    return facts


def read_file(folder: int, name: str) -> bytes:
    """A regular file of this user's in the folder with descriptor `folder`; a link or a pipe is refused."""
    fd = os.open(name, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC, dir_fd=folder)
    try:
        if not stat.S_ISREG(check_owner(fd).st_mode):
            raise ArtifactError("corrupt", f"{name} is not a file")
        with open(fd, "rb", closefd=False) as file:
            return file.read()
    finally:
        os.close(fd)


def write_file(path: Path, content: bytes) -> None:
    with path.open("xb") as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())


def sync_folder(folder: Path) -> None:
    # Some file systems cannot sync a folder; the rename is atomic there all the same.
    with contextlib.suppress(OSError):
        fd = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            os.fsync(fd)
        finally:
            os.close(fd)
