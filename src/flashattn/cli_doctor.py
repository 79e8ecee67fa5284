"""The commands `env` and `doctor`: what is here, and whether it works together."""

from __future__ import annotations

import importlib
import os
import platform
import re
import sys
import tempfile
import textwrap
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

from . import settings
from ._version import __version__
from .cli_output import Report, Usage, counted, pairs, size_text, table
from .cli_sources import (
    BACKENDS,
    KERNELS,
    PACKAGE,
    Probe,
    aot_dir,
    cache_root,
    checked_settings,
    gpus,
    has_triton,
    unknown_variables,
)
from .jit import place
from .jit.compile import code_environment
from .jit.decision import CACHE, WHEEL
from .jit.driver import DeviceInfo, DriverError
from .jit.spec import source_digest
from .jit.store import LAYOUT, UserStore
from .jit.targets import SUPPORTED, target_of
from .jit.wheel import Miss
from .settings import Settings
from .specs import declared_specs

OLDEST_TORCH, OLDEST_TRITON = (2, 10), (3, 6)
_WIDTH = 96
OK, NOTE, PROBLEM = "ok", "note", "problem"


class Check(NamedTuple):
    """One line of `doctor`. `level` is "ok", "note" (works, with a limit worth knowing) or "problem"."""

    level: str
    name: str
    text: str


# ---- env


def env(args) -> Report:
    """Versions, GPUs, the settings that are set, and paths."""
    problems, current = [], None
    try:
        current = checked_settings()
    except Usage as error:
        problems.append(str(error))
    versions = _versions()
    devices, complaints = _devices()
    variables = {name: os.environ[name] for name in sorted(os.environ) if name.startswith(settings.PREFIX)}
    variables |= code_environment()
    root, complaint = cache_root(current or Settings())
    paths = {
        "package": str(PACKAGE),
        "wheel": str(aot_dir(current or Settings())),
        "cache": str(root) if root else f"none: {complaint}",
    }
    sources = source_digest(KERNELS)
    rows = [(f"{gpu.backend}:{gpu.device}", gpu.name, gpu.target, gpu.driver, gpu.problem or "") for gpu in devices]
    shown = table(("gpu", "name", "target", "driver", "problem"), rows, "  ") if rows else f"  none: {complaints[0]}"
    unset = "  none, so every one has its default: docs/jit-and-wheel.md lists them"
    text = "\n".join(
        [
            "versions",
            pairs(versions),
            "GPUs",
            shown,
            "variables that are set",
            pairs(variables) or unset,
            "paths",
            pairs(paths),
            f"kernels' sources  {sources[:12] if sources else 'cannot be read'}",
            *(f"problem: {problem}" for problem in problems),
        ]
    )
    data = {
        "versions": versions,
        "gpus": [_gpu_data(gpu) for gpu in devices],
        "variables": variables,
        "settings": settings.shown(current) if current else None,
        "paths": paths | {"cache": str(root) if root else None},
        "source_digest": sources,
    }
    return Report(text=text, data=data, problems=tuple(problems))


def _versions() -> dict[str, str]:
    import torch

    built_for = f"CUDA {torch.version.cuda}" if torch.version.cuda else "no GPU"
    built_for = f"HIP {torch.version.hip}" if torch.version.hip else built_for
    return {
        "flashattn": __version__,
        "python": f"{platform.python_version()} ({sys.executable})",
        "torch": f"{torch.__version__}, built for {built_for}",
        "triton": _triton()[0],
        "system": platform.platform(),
    }


def _triton() -> tuple[str, str | None]:
    """Triton's version, and what keeps it from compiling."""
    if not has_triton():
        return "not installed", "Triton is not installed"
    try:
        version = importlib.import_module("triton").__version__
    except Exception as error:
        # An installation can be broken in any way.
        text = f"Triton cannot be imported ({type(error).__name__}: {error})"
        return "cannot be imported", text
    old = _number(version) < OLDEST_TRITON
    return version, f"Triton {version} is too old, 3.6 or newer is needed" if old else None


def _number(version: str) -> tuple[int, ...]:
    return tuple(int(part) for part in re.findall(r"\d+", version)[:2])


def _devices() -> tuple[list[DeviceInfo], list[str]]:
    """The GPUs of every driver, and why a driver has none."""
    found, complaints = [], []
    for backend in BACKENDS:
        try:
            found += gpus(backend)
        except DriverError as error:
            complaints.append(str(error))
    return found, complaints or ["the driver shows none"]


def _gpu_data(gpu: DeviceInfo) -> dict:
    return {name: getattr(gpu, name) for name in DeviceInfo.__slots__}


# ---- doctor


def doctor(args) -> Report:
    """Whether each part works, with the reason where it does not."""
    checks, given = _check_settings()
    current = given or Settings()
    found, targets = _check_gpus()
    targets = args.target or targets
    checks += [_check_torch(bool(targets) and not args.target), *found]
    covered, probe = bool(targets), Probe(replace(current, force_jit=False))
    for target in targets:
        # Which kernels a call asks for depends on the settings. What is there does not depend on FLASHATTN_FORCE_JIT.
        check, complete = _check_kernels(probe, target) if given else (None, False)
        checks += [check] if check else []
        covered = covered and complete
    checks += [_check_jit(current, bool(targets), covered), _check_cache(current)]
    tainted = code_environment()
    if tainted:
        text = f"{', '.join(tainted)} changes machine code: kernels compiled here are kept apart from others"
        checks.append(Check(NOTE, "environment", text))
    problems = tuple(f"{check.name}: {check.text}" for check in checks if check.level == PROBLEM)
    count = counted(len(problems), "problem")
    rows = [row for check in checks for row in _lines(check)]
    text = f"{table(Check._fields, rows)}\n{count if problems else 'No problem was found.'}"
    return Report(text=text, data={"checks": [check._asdict() for check in checks]}, problems=problems)


def _lines(check: Check) -> list[tuple[str, str, str]]:
    """The rows of a table that `check` takes: its text is broken into lines."""
    parts = textwrap.wrap(check.text, _WIDTH, break_long_words=False, break_on_hyphens=False)
    return [(check.level, check.name, parts[0]), *(("", "", part) for part in parts[1:])]


def _check_settings() -> tuple[list[Check], Settings | None]:
    """What is wrong with the variables; and the settings, if they can be read."""
    try:
        current = checked_settings()
        checks = [Check(OK, "settings", "every FLASHATTN_* variable can be read")]
    except Usage as error:
        text = (
            f"{error}. Every call raises this; what is said below is for the defaults, and the wheel is not looked at"
        )
        current, checks = None, [Check(PROBLEM, "settings", text)]
    for name, nearest in unknown_variables().items():
        text = f"{name} is set and is no variable of flashattn: did you mean {nearest}?"
        checks.append(Check(PROBLEM, "settings", text))
    return checks, current


def _check_torch(needs_gpu: bool) -> Check:
    import torch

    version = torch.__version__
    if _number(version) < OLDEST_TORCH:
        return Check(PROBLEM, "torch", f"torch {version} is too old, 2.10 or newer is needed")
    if needs_gpu and not torch.cuda.is_available():
        text = f"the driver shows a GPU and torch {version} does not: install a torch that is built for it"
        return Check(PROBLEM, "torch", text)
    return Check(OK, "torch", version)


def _check_gpus() -> tuple[list[Check], tuple[str, ...]]:
    """A line for each GPU, or one that says why there is none; and the targets that kernels are for."""
    checks, absent, targets = [], [], {}
    for backend in BACKENDS:
        try:
            devices = gpus(backend)
            if not devices:
                absent.append(f"the driver of {backend} shows no GPU")
        except DriverError as error:
            if error.code is None and "cannot be opened" in str(error):
                absent.append(str(error))
            else:
                checks.append(Check(PROBLEM, "driver", str(error)))
            continue
        for gpu in devices:
            checks.append(_check_gpu(gpu))
            if checks[-1].level != PROBLEM:
                targets[gpu.target] = None
    if not checks:
        text = f"{absent[0]}; CPU tensors work by the reference. `doctor --target sm_90` looks at the rest for a GPU"
        checks.append(Check(NOTE, "driver", text))
    return checks, tuple(targets)


def _check_gpu(gpu: DeviceInfo) -> Check:
    name = f"{gpu.backend}:{gpu.device}"
    if gpu.problem:
        return Check(PROBLEM, name, gpu.problem)
    try:
        target_of(gpu.target)
    except ValueError as error:
        return Check(PROBLEM, name, f"{gpu.name}: {error}")
    return Check(OK, name, f"{gpu.name}, {gpu.target}, {gpu.driver}")


def _check_kernels(probe: Probe, target: str) -> tuple[Check, bool]:
    """Where the declared kernels for `target` are, and whether none of them would have to be compiled."""
    wanted = declared_specs("core", target)
    count = Counter(probe.find(spec).source for spec in wanted.values())
    level, why = _wheel_trouble(probe, target, count[WHEEL] == len(wanted))
    where = f"of {counted(len(wanted), 'kernel')} of the core profile {count[WHEEL]} are in the wheel"
    text = f"{why}{where} and {count[CACHE]} in the cache"
    complete = count[WHEEL] + count[CACHE] == len(wanted)
    obstacle = probe.obstacle() or ""
    if complete:
        return Check(level, target, text), True
    if obstacle.startswith(settings.PREFIX):
        return Check(PROBLEM, target, f"{text}; the others raise KernelMissing, since {obstacle}"), False
    return Check(level, target, f"{text}; the others are compiled on first call"), False


def _wheel_trouble(probe: Probe, target: str, complete: bool) -> tuple[str, str]:
    """The level of what is wrong with the wheel's folder for `target`, and the beginning of a sentence on it."""
    if target not in SUPPORTED:
        return NOTE, f"JIT only: no wheel holds kernels for {target} (it can for {', '.join(SUPPORTED)}); "
    wheel = probe.wheel(target)
    found = wheel.manifest()
    if isinstance(found, Miss):
        return NOTE if found.reason == "not built" else PROBLEM, f"the wheel: {found.reason}: {found.text}; "
    digest = wheel.source_digest(probe.digest)
    if isinstance(digest, Miss):
        return PROBLEM, f"the wheel: {digest.reason}: {digest.text}; "
    return (OK, "") if complete else (PROBLEM, "`python -m flashattn verify` names what is wrong with the wheel; ")


def _check_jit(current: Settings, has_target: bool, covered: bool) -> Check:
    """Whether kernels can be compiled here. Where the wheel has all that is declared it is no problem if not."""
    version, complaint = _triton()
    if current.disable_jit:
        return Check(NOTE, "JIT", f"FLASHATTN_DISABLE_JIT is on: nothing is compiled (Triton: {version})")
    if complaint is None and source_digest(KERNELS) is None:
        complaint = "the kernels' sources cannot be read"
    if complaint is not None:
        level = PROBLEM if has_target and not covered else NOTE
        return Check(level, "JIT", f"{complaint}: a kernel that the wheel lacks cannot be compiled")
    if os.environ.get("TRITON_INTERPRET", "0") not in ("", "0"):
        return Check(NOTE, "JIT", "TRITON_INTERPRET is on: kernels are interpreted on CPU tensors and not compiled")
    return Check(OK, "JIT", f"Triton {version} can compile what the wheel lacks")


def _check_cache(current: Settings) -> Check:
    """Whether the user's cache is trusted and can be written."""
    root, complaint = cache_root(current)
    if complaint is None and root is not None:
        complaint = place.distrust(root / LAYOUT) or _unwritable(root)
    if complaint is not None:
        instead = (
            f"{root} is used instead" if root and str(root) not in complaint else "kernels are kept in memory only"
        )
        text = f"{complaint}; {instead}; set FLASHATTN_CACHE_DIR to a folder of your own"
        return Check(NOTE if current.disable_jit else PROBLEM, "cache", text)
    if not root.exists():
        return Check(OK, "cache", f"{root} is made when the first kernel is compiled")
    entries = list(UserStore(root).entries())
    held = f"{counted(len(entries), 'kernel')}, {size_text(sum(entry.bytes for entry in entries))}"
    return Check(OK, "cache", f"{root}: {held}")


def _unwritable(root: Path) -> str | None:
    try:
        if root.exists():
            with tempfile.TemporaryFile(dir=root) as file:
                file.write(b"\0" * 4096)
    except OSError as error:
        return f"{root} cannot be written ({error.strerror})"
    return None
