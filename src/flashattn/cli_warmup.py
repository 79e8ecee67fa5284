"""The command `warmup`: compile, before anybody waits for it, what a call would compile."""

from __future__ import annotations

import functools
import logging
import multiprocessing
import shutil
import signal
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor, as_completed
from concurrent.futures.process import BrokenProcessPool
from dataclasses import replace
from pathlib import Path

from ._version import __version__
from .cli_output import Report, Usage, counted
from .cli_sources import KERNELS, PACKAGE, Probe, cache_root, checked_settings, wanted_targets
from .jit import place, record
from .jit.artifact import Artifact
from .jit.batch import compile_all
from .jit.compile import CompileError, compile_spec
from .jit.decision import CACHE, COMPILED, WHEEL
from .jit.resolve import Resolver
from .jit.spec import KernelSpec
from .jit.store import LAYOUT, UserStore
from .settings import Settings
from .specs import declared_specs

_MODULES = "flashattn.kernels."
_resolver: Resolver | None = None


def warmup(args) -> Report:
    """Fill the user's cache with the kernels of a profile, or of a file that FLASHATTN_RECORD wrote."""
    current = checked_settings()
    if current.disable_jit:
        raise Usage("warmup compiles, and FLASHATTN_DISABLE_JIT forbids it: unset it for this command")
    # A miss is what warmup is for, and it must not write the file that it may be reading.
    current = replace(current, on_aot_miss="warn", record=None)
    root, complaint = cache_root(current)
    if root is not None and complaint is None:
        complaint = place.distrust(root / LAYOUT)
    if complaint is not None or root is None:
        problem = f"what is compiled could not be kept: {complaint}"
        return Report(text=f"problem: {problem}", data={}, problems=(problem,))
    probe = Probe(current)
    wanted = _wanted(args)
    sources = Counter()
    pending = []
    for spec in wanted:
        source = probe.find(spec).source
        sources[source] += 1
        if source not in (WHEEL, CACHE):
            pending.append(spec)
    obstacle = probe.obstacle() if pending else None
    if obstacle is not None:
        problems = tuple(f"{spec.label()}: not compiled, since {obstacle}" for spec in pending)
        return _report(wanted, sources, {}, problems, root, 0.0, None)
    stream = sys.stderr if args.json else sys.stdout
    head = f"{counted(len(wanted), 'kernel')}: {sources[WHEEL]} in the wheel, {sources[CACHE]} in the cache"
    print(f"{head}, {len(pending)} to compile", file=stream, flush=True)
    began, logs = time.monotonic(), Path(tempfile.mkdtemp(prefix="flashattn-warmup-"))
    try:
        done = _compiled(pending, current, args, logs, stream)
        problems = tuple(outcome["error"] for outcome in done.values() if "error" in outcome)
        kept = logs if any(logs.iterdir()) else None
        return _report(wanted, sources, done, problems, root, time.monotonic() - began, kept)
    finally:
        if not any(logs.iterdir()):
            shutil.rmtree(logs)


def _wanted(args) -> list[KernelSpec]:
    """What is to be there afterwards, each once."""
    if args.file is None:
        targets = wanted_targets(args.target)
        return [spec for target in targets for spec in declared_specs(args.profile, target).values()]
    try:
        found = record.read(args.file)
    except OSError as error:
        raise Usage(f"{args.file} cannot be read ({error.strerror})") from None
    except ValueError as error:
        raise Usage(str(error)) from None
    for spec in found:
        # Compiling imports the module, so a file must not be able to name any other.
        if not isinstance(spec.module, str) or not spec.module.startswith(_MODULES):
            raise Usage(f"{args.file} names {spec.module!r}, which is no module of flashattn's kernels")
    return [spec for spec in found if not args.target or spec.target in args.target]


def _compiled(pending: list[KernelSpec], current: Settings, args, logs: Path, stream) -> dict[str, dict]:
    """Compile `pending` and tell of each when it is done. Returns spec key -> {"seconds", "source"} or {"error"}."""
    done = {}
    for spec, outcome in _outcomes(pending, current, args, logs):
        done[spec.key] = outcome
        said = outcome["error"] if "error" in outcome else f"{outcome['seconds']:.1f} s  {spec.label()}"
        mark = "failed: " if "error" in outcome else ""
        width = len(str(len(pending)))
        print(f"[{len(done):{width}}/{len(pending)}] {mark}{said}", file=stream, flush=True)
    return done


def _outcomes(pending, current: Settings, args, logs: Path) -> Iterator[tuple[KernelSpec, dict]]:
    if not pending:
        return
    jobs = min(args.jobs, len(pending))
    context = multiprocessing.get_context("fork")
    pool = ProcessPoolExecutor(jobs, context, initializer=_start, initargs=(current, logs, args.timeout))
    try:
        futures = {pool.submit(_compile_one, spec): spec for spec in pending}
        for future in as_completed(futures):
            spec = futures[future]
            try:
                yield spec, future.result()
            except BrokenProcessPool:
                yield spec, {"error": f"{spec.label()}: a process that compiles was killed; is there enough memory?"}
    finally:
        pool.shutdown(cancel_futures=True)


def _report(wanted, sources, done, problems, root: Path, seconds: float, logs: Path | None) -> Report:
    made = Counter(outcome["source"] for outcome in done.values() if "error" not in outcome)
    data = {
        "path": str(root),
        "kernels": len(wanted),
        "in_wheel": sources[WHEEL],
        "in_cache": sources[CACHE] + made[CACHE],
        "compiled": made[COMPILED],
        "failed": len(problems),
        "seconds": round(seconds, 3),
        "logs": str(logs) if logs else None,
    }
    lines = [f"failed: {problem}" for problem in problems]
    lines += [f"what the compiler printed is in {logs}"] if logs else []
    lines.append(
        f"{counted(len(wanted), 'kernel')}: {data['in_wheel']} in the wheel, {data['in_cache']} in the cache already, "
        f"{data['compiled']} compiled in {seconds:.1f} s, {data['failed']} failed; {root}"
    )
    return Report(text="\n".join(lines), data=data, problems=problems)


# ---- In the processes that compile


def _start(current: Settings, logs: Path, timeout: float) -> None:
    """Ready a process. It asks as a call does, and shares its cache and locks with every other process."""
    global _resolver
    # Ctrl-C goes to all processes at once: the parent stops, and what is being compiled is finished and kept.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    if current.log_level is None:
        logging.getLogger("flashattn").setLevel(logging.ERROR)
    _resolver = Resolver(
        settings=current,
        kernels_dir=KERNELS,
        version=__version__,
        aot_dir=PACKAGE / "_aot",
        compile=functools.partial(_compile_apart, logs=logs, timeout=timeout),
    )


def _compile_one(spec: KernelSpec) -> dict:
    began = time.monotonic()
    try:
        artifact = _resolver.resolve(spec)
        if _resolver.decision(spec.key).source == COMPILED and not _resolver.store.load(artifact.key):
            raise CompileError(f"it was compiled and cannot be kept in {_resolver.store.root}")
    except Exception as error:
        text = str(error) or type(error).__name__
        return {"error": text if spec.label() in text else f"{spec.label()}: {text}"}
    return {"seconds": time.monotonic() - began, "source": _resolver.decision(spec.key).source}


def _compile_apart(spec: KernelSpec, *, source_digest: str, logs: Path, timeout: float, keep_ir=None) -> Artifact:
    """compile_spec in a process of its own: the compiler may abort its process, or never return."""
    if keep_ir is not None:
        return compile_spec(spec, source_digest=source_digest, keep_ir=keep_ir)
    with tempfile.TemporaryDirectory(prefix="flashattn-") as folder:
        store = UserStore(Path(folder))
        outcome = compile_all([spec], source_digest, store.publish, logs, timeout)[spec.key]
        if "error" in outcome:
            raise CompileError(outcome["error"])
        for entry in store.entries():
            return store.load(entry.key)
    raise CompileError(f"{spec.label()}: the compiled kernel cannot be written to {folder}")
