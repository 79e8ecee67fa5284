"""Every FLASHATTN_* variable: read once, when it is first needed, and strictly."""

from __future__ import annotations

import difflib
import logging
import os
import threading
from collections.abc import Mapping
from dataclasses import dataclass, fields
from pathlib import Path

PREFIX = "FLASHATTN_"
_SWITCH = {"0": False, "1": True, "false": False, "true": True}


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """The values of the variables, one field each. A path is absolute, or None where the variable is unset or empty.

    `log_level` is None unless it was asked for, so that a level the application gave to the logger is kept.
    """

    force_jit: bool = False
    disable_jit: bool = False
    on_aot_miss: str = "warn"
    cache_dir: Path | None = None
    aot_dir: Path | None = None
    aot_targets: tuple[str, ...] = ()
    allow_tf32: bool = False
    debug: bool = False
    tiles: Path | None = None
    record: Path | None = None
    keep_ir: Path | None = None
    log_level: str | None = None


@dataclass(frozen=True, slots=True)
class Variable:
    """One variable. `type` is "switch", "choice", "path" or "list"; `default` and `help` are for people."""

    name: str
    type: str
    default: str
    help: str
    choices: tuple[str, ...] = ()

    @property
    def field(self) -> str:
        """Its name in Settings."""
        return self.name.removeprefix(PREFIX).lower()

    @property
    def accepted(self) -> str:
        """What it takes, in words."""
        return {
            "switch": "0, 1, true or false",
            "choice": " or ".join(self.choices),
            "path": "a path",
            "list": "names with commas between them",
        }[self.type]

    def parse(self, text: str):
        """The value of `text`; ValueError names the variable, what was found and what is accepted."""
        if self.type == "switch" and text in _SWITCH:
            return _SWITCH[text]
        if self.type == "choice" and text in self.choices:
            return text
        if self.type == "list":
            return tuple(name for name in text.replace(",", " ").split())
        if self.type == "path" and text not in _SWITCH:
            # Empty counts as unset: as a path it would be the current folder.
            return Path(os.path.abspath(os.path.expanduser(text))) if text else None
        raise ValueError(f"{self.name} is {text!r}: it takes {self.accepted}; correct it or unset it")


TABLE = (
    Variable("FLASHATTN_FORCE_JIT", "switch", "0", "Compile every kernel anew, once a process, and keep the result."),
    Variable("FLASHATTN_DISABLE_JIT", "switch", "0", "Never compile: a kernel that is not there already is an error."),
    Variable(
        "FLASHATTN_ON_AOT_MISS",
        "choice",
        "warn",
        "When neither the wheel nor the user's cache has a kernel: compile it, or raise.",
        ("warn", "error"),
    ),
    Variable(
        "FLASHATTN_CACHE_DIR",
        "path",
        "${XDG_CACHE_HOME:-~/.cache}/flashattn",
        "Folder of the kernels compiled here. It must belong to the user, and others must not be able to write to it.",
    ),
    Variable("FLASHATTN_AOT_DIR", "path", "_aot in the package", "Folder of the kernels compiled ahead of time."),
    Variable("FLASHATTN_AOT_TARGETS", "list", "", "When a wheel is built: the GPUs that it gets compiled kernels for."),
    Variable("FLASHATTN_ALLOW_TF32", "switch", "0", "Let float32 inputs be multiplied in TF32."),
    Variable(
        "FLASHATTN_DEBUG",
        "switch",
        "0",
        "Wait for the GPU after every launch, so that a fault is told at the call that caused it, and check lengths.",
    ),
    Variable("FLASHATTN_TILES", "path", "", "JSON file of tile sizes used in place of the measured ones."),
    Variable("FLASHATTN_RECORD", "path", "", "File that gets a line for each kernel asked for; `warmup` reads it."),
    Variable("FLASHATTN_KEEP_IR", "path", "", "Folder that gets the compiler's intermediate code of each compile."),
    Variable(
        "FLASHATTN_LOG_LEVEL",
        "choice",
        "info",
        "What the logger `flashattn` shows. Compiles are told at info, damage at warning.",
        ("debug", "info", "warning", "error"),
    ),
)

_lock = threading.Lock()
_settings: Settings | None = None
_warned: set[str] = set()


def get() -> Settings:
    """The settings of this process. The environment is read at the first call; ValueError if it is wrong."""
    return _settings or _read_once()


def reset() -> None:
    """Read the environment again at the next `get()`."""
    global _settings
    with _lock:
        _settings = None
        _warned.clear()


def _read_once() -> Settings:
    global _settings
    with _lock:
        if _settings is None:
            _settings = read(os.environ)
        return _settings


def read(environ: Mapping[str, str]) -> Settings:
    """Parse `environ`. Raises ValueError for a wrong value; a name that is not in TABLE is warned of once."""
    known = {variable.name: variable for variable in TABLE}
    for name in sorted(environ):
        if name.startswith(PREFIX) and name not in known and name not in _warned:
            _warned.add(name)
            nearest = difflib.get_close_matches(name, known, n=1, cutoff=0)[0]
            logging.getLogger("flashattn").warning(
                "%s is set and is no variable of flashattn: did you mean %s?", name, nearest
            )
    values = {known[name].field: known[name].parse(text) for name, text in environ.items() if name in known}
    found = Settings(**values)
    if found.force_jit and found.disable_jit:
        raise ValueError(
            "FLASHATTN_FORCE_JIT and FLASHATTN_DISABLE_JIT are both on: one asks for every kernel to be compiled, "
            "the other forbids compiling; unset one of them"
        )
    return found


def shown(settings: Settings) -> dict[str, str]:
    """Variable name -> its value, as text for people; unset ones give their default."""
    values = {field.name: getattr(settings, field.name) for field in fields(settings)}
    return {variable.name: _text(values[variable.field], variable.default) for variable in TABLE}


def _text(value, default: str) -> str:
    if isinstance(value, bool):
        return str(int(value))
    if isinstance(value, tuple):
        return ",".join(value)
    return default if value is None else str(value)
