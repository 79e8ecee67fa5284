"""Compile several specs one after the other, surviving a compiler that aborts its process or never returns."""

from __future__ import annotations

import json
import os
import select
import signal
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path

from .artifact import Artifact
from .compile import compile_spec
from .spec import KernelSpec


def compile_all(
    specs: list[KernelSpec], source_digest: str, publish: Callable[[Artifact], object], logs: Path, timeout: float
) -> dict[str, dict]:
    """Compile `specs` and `publish` each. Returns spec key -> {"seconds"} or {"error", "log"}; an error names its spec.

    A kernel that takes longer than `timeout` seconds is an error. What the compiler of a failed spec prints is kept
    in the folder `logs`. POSIX only; the caller should have no other threads, since it is forked.
    """
    outcomes, todo = {}, list(specs)
    while todo:
        # After a crash the next child goes on with the spec after the one that crashed; what its compiler left lying
        # about goes with this folder.
        with tempfile.TemporaryDirectory(prefix="flashattn-") as folder:
            for outcome in _in_child(todo, source_digest, publish, logs, timeout, folder):
                outcomes[todo.pop(0).key] = outcome
    return outcomes


def _in_child(todo, source_digest, publish, logs, timeout, folder) -> Iterator[dict]:
    """Outcomes of `todo` in order, up to and with the first one that ends the child process."""
    waiting = list(todo)
    reader, writer = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            os.close(reader)
            os.environ["TMPDIR"] = tempfile.tempdir = folder
            for spec in waiting:
                outcome = _compile_logged(spec, source_digest, publish, _log(logs, spec))
                os.write(writer, json.dumps(outcome).encode() + b"\n")
            os._exit(0)
        finally:
            # Whatever happened, the child must not go on with its parent's work.
            os._exit(1)
    os.close(writer)
    # Unbuffered, or select would not see what readline has already taken.
    with os.fdopen(reader, "rb", buffering=0) as report:
        late = False
        while waiting:
            late = not select.select([report], [], [], timeout)[0]
            line = b"" if late else report.readline()
            if not line:
                break
            waiting.pop(0)
            yield json.loads(line)
    if late:
        os.kill(child, signal.SIGKILL)
    code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    if waiting:
        how = signal.Signals(-code).name if code < 0 else f"exit status {code}"
        why = f"not compiled within {timeout:g} s" if late else f"the compiler ended its process ({how})"
        yield {"error": f"{waiting[0].label()}: {why}", "log": str(_log(logs, waiting[0]))}


def _log(logs: Path, spec: KernelSpec) -> Path:
    return logs / f"{spec.key}.log"


def _compile_logged(spec: KernelSpec, source_digest: str, publish, log: Path) -> dict:
    """Runs in the child. All that is printed goes into `log`, which is kept if the spec fails."""
    log.parent.mkdir(parents=True, exist_ok=True)
    with log.open("wb") as file:
        os.dup2(file.fileno(), 1)
        os.dup2(file.fileno(), 2)
    began = time.monotonic()
    try:
        publish(compile_spec(spec, source_digest=source_digest))
    except Exception as error:
        traceback.print_exc()
        sys.stderr.flush()
        text = str(error)
        return {"error": text if spec.label() in text else f"{spec.label()}: {error!r}", "log": str(log)}
    log.unlink()
    return {"seconds": time.monotonic() - began}
