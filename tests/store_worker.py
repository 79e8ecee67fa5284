"""A process that resolves stub kernels as told on stdin, a line of JSON each, and answers on stdout.

Its builder does what the command's "builder" says: "quick"; "slow"; "hold" (say so and wait for a line); or
"die publishing" (be killed when everything is written and nothing published).
"""

from __future__ import annotations

import functools
import json
import os
import signal
import subprocess
import sys
import time
import types
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]


class Worker:
    """The parent's side of such a process."""

    def __init__(self, uid: int | None = None, **environ: str):
        kept = {name: value for name, value in os.environ.items() if not name.startswith(("FLASHATTN_", "TRITON_"))}
        self.process = subprocess.Popen(
            [sys.executable, __file__, *([str(uid)] if uid is not None else [])],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env={**kept, **environ},
        )

    def tell(self, **command) -> None:
        self.process.stdin.write(json.dumps(command) + "\n")
        self.process.stdin.flush()

    def hear(self) -> dict:
        """The next answer. EOFError with what it printed if the process is gone."""
        line = self.process.stdout.readline()
        if not line:
            raise EOFError(f"exit status {self.process.wait()}: {self.process.stderr.read()}")
        return json.loads(line)

    def ask(self, **command) -> dict:
        self.tell(**command)
        return self.hear()

    def end(self) -> str:
        """Let the process end. Returns what it printed to stderr."""
        return self.process.communicate()[1]


def serve() -> None:
    # The package's own __init__ imports torch, which takes seconds in each of many processes.
    package = types.ModuleType("flashattn")
    package.__path__ = [str(ROOT / "src" / "flashattn")]
    sys.modules["flashattn"] = package
    import filelock  # noqa: F401
    from stub_compiler import VERSION, StubCompiler, spec

    from flashattn import settings
    from flashattn.jit import files
    from flashattn.jit.compile import toolchain
    from flashattn.jit.resolve import Resolver

    # If it is left waiting, its parent is to see an end and not a silence.
    signal.alarm(100)
    # All that is needed is imported by now: after the change of user the interpreter's files may be out of reach.
    toolchain()
    if sys.argv[1:]:
        os.setgid(int(sys.argv[1]))
        os.setuid(int(sys.argv[1]))

    def say(**answer) -> None:
        print(json.dumps(answer), flush=True)

    def build(builder: str, log: str | None, spec) -> None:
        if log:
            with open(log, "a") as file:
                file.write(f"{spec.key}\n")
        if builder == "hold":
            say(building=spec.key)
            sys.stdin.readline()
        elif builder == "slow":
            # As a compiler is, so that others come while it runs.
            time.sleep(0.02)
        elif builder == "die publishing":
            files.sync_folder = lambda folder: os.kill(os.getpid(), signal.SIGKILL)

    for line in sys.stdin:
        command = json.loads(line)
        cache_dir = command.get("cache_dir")
        how = command.get("builder", "quick"), command.get("log")
        compiler = StubCompiler(functools.partial(build, *how))
        resolver = Resolver(
            settings=settings.Settings(cache_dir=cache_dir and Path(cache_dir)),
            kernels_dir=Path(command["kernels_dir"]),
            version=VERSION,
            aot_dir=Path(command["kernels_dir"]) / "none",
            compile=compiler,
        )
        if "lock_timeout" in command:
            resolver.store.lock_timeout = command["lock_timeout"]
        codes = [resolver.resolve(spec(factor)).code.decode() for factor in command["factors"]]
        sources = [decision.source for decision in resolver.decisions()]
        say(compiles=len(compiler.compiled), codes=codes, sources=sources, root=str(resolver.store.root))


if __name__ == "__main__":
    serve()
