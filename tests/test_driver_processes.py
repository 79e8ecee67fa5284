"""Forked and spawned processes, and processes that have the driver and nothing else."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from pathlib import Path

import pytest
from fake_driver import HAS_COMPILER, NO_COMPILER, artifact
from fake_driver_fixtures import copy_of_library, cuda_fixture, loaded

from flashattn.jit import driver

SOURCES = Path(driver.__file__).parents[2]

cuda = cuda_fixture


@pytest.mark.skipif(not hasattr(os, "fork"), reason="this system has no fork")
class TestFork:
    def in_child(self, work) -> str:
        """What `work()` returned or raised in a forked child."""
        reading, writing = os.pipe()
        child = os.fork()
        if child == 0:
            try:
                answer = f"fine: {work()}"
            except BaseException as error:
                answer = f"{type(error).__name__}: {error}"
            os.write(writing, answer.encode())
            os._exit(0)
        os.close(writing)
        with os.fdopen(reading, "rb") as pipe:
            answer = pipe.read().decode()
        os.waitpid(child, 0)
        return answer

    def test_a_child_of_a_parent_that_used_no_gpu_works(self, cuda):
        def work():
            loaded(cuda).launch(1, 0, (16, 3))
            return len(cuda.launches())

        assert self.in_child(work) == "fine: 1"

    def test_a_child_of_a_parent_that_used_the_gpu_is_told_what_to_do(self, cuda):
        kernel = loaded(cuda)
        answers = [
            self.in_child(lambda: driver.load(artifact(), 0)),
            self.in_child(lambda: kernel.launch(1, 0, (16, 3))),
        ]
        for answer in answers:
            assert answer.startswith("DriverError: ")
            assert "process forked after its parent had used it" in answer
            assert "'spawn'" in answer
        assert "probe[sm_90" in answers[1]
        kernel.launch(1, 0, (16, 3))
        assert len(cuda.launches()) == 1

    def test_a_lock_held_while_forking_does_not_stop_the_child(self, cuda):
        held, forked = threading.Event(), threading.Event()

        def hold():
            with driver._tables.lock:
                held.set()
                forked.wait()

        thread = threading.Thread(target=hold)
        thread.start()
        held.wait()
        try:
            answer = self.in_child(lambda: driver.load(artifact(), 0).label)
        finally:
            forked.set()
            thread.join()
        assert answer == f"fine: {artifact().label}"


# jit alone: the package around it imports torch.
PROGRAM = """
import sys, types
sys.path.insert(0, {tests!r})
sys.modules["flashattn"] = types.ModuleType("flashattn")
sys.modules["flashattn"].__path__ = [{sources!r} + "/flashattn"]
opened = []
sys.addaudithook(lambda event, args: opened.append(args[0]) if event == "ctypes.dlopen" else None)
from flashattn.jit import driver
from fake_driver import CStandIn, artifact
assert not [name for name in opened if name and ("cuda" in name or "hip" in name)], opened
for name in ("torch", "triton", "numpy", "cuda"):
    assert name not in sys.modules, name
    sys.modules[name] = None
stand_in = CStandIn("libcuda.so.1")
kernel = driver.load(artifact(shared=100000), 1)
stand_in.make_current(1)
kernel.launch(4, 9, (16, 3))
(call,) = stand_in.launches()
print(call.grid, call.stream, call.device)
"""


@pytest.mark.skipif(not HAS_COMPILER, reason=NO_COMPILER)
class TestProcess:
    @pytest.fixture
    def environment(self, tmp_path, tmp_path_factory):
        library = copy_of_library(tmp_path / "system", tmp_path_factory)
        return {"LD_LIBRARY_PATH": str(library.parent), "PATH": "", "PYTHONDONTWRITEBYTECODE": "1"}

    def test_launching_needs_the_driver_only_and_importing_not_even_that(self, environment):
        program = PROGRAM.format(sources=str(SOURCES), tests=str(Path(__file__).parent))
        done = subprocess.run([sys.executable, "-c", program], env=environment, capture_output=True, text=True)
        assert done.returncode == 0, done.stderr
        assert done.stdout == "(4, 1, 1) 9 1\n"

    def test_spawned_workers_load_for_themselves(self, cuda, environment):
        loaded(cuda).launch(1, 0, (16, 3))
        program = PROGRAM.format(sources=str(SOURCES), tests=str(Path(__file__).parent))
        workers = [subprocess.Popen([sys.executable, "-c", program], env=environment) for _ in range(2)]
        assert [worker.wait() for worker in workers] == [0, 0]
        assert len(cuda.launches()) == 1
