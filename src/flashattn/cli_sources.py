"""What the commands look at, and do not change: settings, GPUs, the wheel, the user's cache, the sources."""

from __future__ import annotations

import contextlib
import difflib
import importlib.util
import os
from dataclasses import replace
from pathlib import Path

from . import settings, tiles
from ._version import __version__
from .cli_output import Usage
from .jit import driver, place
from .jit.artifact import Artifact
from .jit.decision import Decision, KernelMissing
from .jit.driver import DeviceInfo, DriverError
from .jit.resolve import Resolver
from .jit.spec import KernelSpec
from .jit.store import UserStore
from .jit.targets import SUPPORTED, target_of
from .launch import declared_keys
from .settings import Settings

PACKAGE = Path(__file__).parent
KERNELS = PACKAGE / "kernels"
BACKENDS = ("cuda", "hip")


# ---- Settings


def checked_settings() -> Settings:
    """The settings of this process. Raises Usage if a variable, or the file that it names, is wrong."""
    try:
        found = settings.get()
        if found.tiles is not None:
            tiles.read_override(found.tiles)
    except ValueError as error:
        raise Usage(str(error)) from None
    return found


def unknown_variables() -> dict[str, str]:
    """Each FLASHATTN_* variable that is set and that there is not, and the nearest that there is."""
    known = [variable.name for variable in settings.TABLE]
    names = [name for name in sorted(os.environ) if name.startswith(settings.PREFIX) and name not in known]
    return {name: difflib.get_close_matches(name, known, n=1, cutoff=0)[0] for name in names}


def has_triton() -> bool:
    """Whether Triton is installed; it is not imported."""
    with contextlib.suppress(ImportError, ValueError):
        return importlib.util.find_spec("triton") is not None
    return False


# ---- GPUs and targets


def gpus(backend: str) -> list[DeviceInfo]:
    """The GPUs that a driver shows. Raises DriverError if there is no driver, or it shows none."""
    return [driver.device_info(index, backend) for index in range(driver.device_count(backend))]


def targets_here() -> tuple[str, ...]:
    """The targets of the GPUs of this machine, each once; those that no kernel runs on are left out."""
    found = {}
    for backend in BACKENDS:
        with contextlib.suppress(DriverError):
            for gpu in gpus(backend):
                with contextlib.suppress(ValueError):
                    found[target_of(gpu.target).name] = None
    return tuple(found)


def wanted_targets(named: tuple[str, ...] | None) -> tuple[str, ...]:
    """Those named, else those of this machine's GPUs. Raises Usage if there are neither."""
    found = named or targets_here()
    if not found:
        raise Usage(f"no GPU was found here, so say for which: --target {SUPPORTED[3]}, or another of {_names()}")
    return found


def parse_target_list(text: str) -> tuple[str, ...]:
    """Targets with commas between them. Raises ValueError for one that no kernel runs on."""
    names = [name for name in text.replace(",", " ").split() if name]
    if not names:
        raise ValueError(f"no target is named; there are {_names()}")
    return tuple(dict.fromkeys(target_of(name).name for name in names))


def _names() -> str:
    return ", ".join(SUPPORTED)


# ---- The wheel


def aot_dir(current: Settings) -> Path:
    return current.aot_dir or PACKAGE / "_aot"


# ---- The user's cache


def cache_root(current: Settings) -> tuple[Path | None, str | None]:
    """The folder that a call would keep compiled kernels in, and what is wrong with the wanted one.

    Unlike a call this does not make the wanted folder.
    """
    wanted = current.cache_dir or place.default_folder(os.environ)
    if wanted is not None and not os.path.lexists(wanted) and _can_be_made(wanted):
        return wanted, None
    return place.choose(current.cache_dir)


def _can_be_made(folder: Path) -> bool:
    parent = next(parent for parent in folder.parents if os.path.lexists(parent))
    return parent.is_dir() and os.access(parent, os.W_OK | os.X_OK)


class ReadOnlyStore(UserStore):
    """The user's cache, looked at: nothing is moved, and no entry counts as used."""

    def load(self, key: str) -> Artifact | None:
        folder = self._entry(key)
        try:
            before = os.lstat(folder) if folder else None
        except OSError:
            before = None
        try:
            return super().load(key)
        finally:
            with contextlib.suppress(OSError):
                if before is not None and os.lstat(folder).st_mtime_ns != before.st_mtime_ns:
                    os.utime(folder, ns=(before.st_atime_ns, before.st_mtime_ns), follow_symlinks=False)

    def quarantine(self, key: str) -> bool:
        return False

    def publish(self, artifact: Artifact, replace: bool = False) -> bool:
        return False


# ---- Where a kernel would come from


class Probe(Resolver):
    """Says where kernels would come from, by the steps of a call: compiles nothing and changes no file."""

    def __init__(self, current: Settings):
        super().__init__(
            settings=replace(current, record=None),
            kernels_dir=KERNELS,
            version=__version__,
            aot_dir=PACKAGE / "_aot",
            declared=declared_keys,
        )
        self.given = current
        self._looked_at = ReadOnlyStore(cache_root(current)[0])
        self.freeze()

    @property
    def store(self) -> UserStore:
        return self._looked_at

    def find(self, spec: KernelSpec) -> Decision:
        """Its source is "missing" where the kernel would have to be compiled."""
        with contextlib.suppress(KernelMissing):
            self.resolve(spec)
        return self.decision(spec.key)

    def obstacle(self) -> str | None:
        """Why a kernel that is not found would not be compiled; None if it would be."""
        if self.given.disable_jit:
            return "FLASHATTN_DISABLE_JIT is on"
        if self.given.on_aot_miss == "error" and not self.given.force_jit:
            return "FLASHATTN_ON_AOT_MISS is error"
        if self.digest is None:
            return "the kernels' sources cannot be read"
        return None if has_triton() else "Triton is not installed"
