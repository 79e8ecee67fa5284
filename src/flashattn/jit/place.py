"""Which folder may hold the user's compiled kernels: one that nobody else can write to."""

from __future__ import annotations

import os
import stat
from collections.abc import Mapping
from pathlib import Path

_TEMPORARY = ("/tmp", "/var/tmp", "/dev/shm")


def choose(folder: Path | None, environ: Mapping[str, str] | None = None) -> tuple[Path | None, str | None]:
    """The folder to keep compiled kernels in, created if needed, and what was wrong with the wanted one.

    `folder` None stands for ${XDG_CACHE_HOME:-~/.cache}/flashattn. Where the wanted folder cannot be made or trusted,
    the answer is a private temporary folder, or None. The current folder is never looked at.
    """
    environ = os.environ if environ is None else environ
    wanted = folder or default_folder(environ)
    complaint = "there is no home folder (HOME)" if wanted is None else _unusable(wanted)
    if complaint is None:
        return wanted, None
    return private_temporary(environ), complaint


def default_folder(environ: Mapping[str, str]) -> Path | None:
    """${XDG_CACHE_HOME:-$HOME/.cache}/flashattn; None without a home. "/" is the home of users that have none."""
    cache = environ.get("XDG_CACHE_HOME", "")
    if os.path.isabs(cache):
        return Path(cache) / "flashattn"
    home = environ.get("HOME", "")
    if not os.path.isabs(home) or os.path.normpath(home).strip("/") == "" or not os.path.isdir(home):
        return None
    return Path(home) / ".cache" / "flashattn"


def distrust(folder: Path) -> str | None:
    """Why what lies in `folder` must not be loaded. None if it may be, or if there is no such folder."""
    try:
        facts = os.stat(folder)
    except (FileNotFoundError, NotADirectoryError):
        return None
    except OSError as error:
        return f"{folder} cannot be looked at ({error.strerror})"
    if not stat.S_ISDIR(facts.st_mode):
        return f"{folder} is not a folder"
    if facts.st_uid != os.geteuid():
        return f"{folder} belongs to another user (uid {facts.st_uid}, this process has {os.geteuid()})"
    if facts.st_mode & 0o022:
        return f"others may write to {folder} (mode {facts.st_mode & 0o777:04o}); `chmod go-w` makes it usable"
    return None


def _unusable(folder: Path) -> str | None:
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    except OSError as error:
        return distrust(folder) or f"{folder} cannot be made ({error.strerror})"
    complaint = distrust(folder)
    if complaint is None and not os.access(folder, os.R_OK | os.X_OK):
        return f"{folder} cannot be read"
    return complaint


def private_temporary(environ: Mapping[str, str]) -> Path | None:
    """A folder of this user alone below TMPDIR, /tmp, /var/tmp or /dev/shm; None if none can be had.

    Its name can be foreseen, so it is used only if it is a real folder (no link) of this user with mode 0700.
    """
    for base in (environ.get("TMPDIR", ""), *_TEMPORARY):
        folder = Path(base) / f"flashattn-{os.geteuid()}"
        try:
            if not os.path.isabs(base) or not _keeps_names(base):
                continue
            if not os.path.lexists(folder):
                os.mkdir(folder, 0o700)
            facts = os.lstat(folder)
        except OSError:
            continue
        private = stat.S_ISDIR(facts.st_mode) and facts.st_uid == os.geteuid() and not facts.st_mode & 0o077
        if private and os.access(folder, os.R_OK | os.W_OK | os.X_OK):
            return folder
    return None


def _keeps_names(base: str) -> bool:
    """Whether nobody but root can rename this user's folders in `base`."""
    facts = os.stat(base)
    return facts.st_uid in (0, os.geteuid()) and bool(facts.st_mode & stat.S_ISVTX or not facts.st_mode & 0o022)
