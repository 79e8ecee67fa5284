"""Runs in a process that has an installed wheel and stand-ins for the GPU's driver: no Triton, no other process.

    python installed_wheel_child.py TESTS FOLDER

Prints, as JSON, how each spec that the wheel in FOLDER should hold was resolved, after it was loaded and launched.
"""

import ctypes
import json
import sys
from pathlib import Path

tests, installed = sys.argv[1:]
sys.path.insert(0, installed)
# From here on, importing Triton raises.
sys.modules["triton"] = None

import flashattn  # noqa: E402
from flashattn import settings, specs  # noqa: E402
from flashattn._version import __version__  # noqa: E402
from flashattn.jit import driver, targets  # noqa: E402
from flashattn.jit.resolve import Resolver  # noqa: E402

sys.path.append(tests)
import fake_driver_python  # noqa: E402

PACKAGE = Path(flashattn.__file__).parent


def refuse_processes(event, args):
    if event in ("subprocess.Popen", "os.posix_spawn", "os.fork", "os.exec", "os.system"):
        raise AssertionError(f"a process was started: {event} {args}")


class HipStandIn(fake_driver_python.HipStandIn):
    """A stand-in whose device is of the target `chosen`."""

    chosen = "gfx942"

    @fake_driver_python._function(ctypes.c_void_p, ctypes.c_int)
    def hipGetDevicePropertiesR0600(self, out, device):
        name = self.chosen.encode() + b"\0"
        ctypes.memmove(out + 1160, name, len(name))

    @fake_driver_python._function(ctypes.c_void_p, ctypes.c_int, ctypes.c_int)
    def hipDeviceGetAttribute(self, out, which, device):
        ctypes.c_int.from_address(out).value = targets.target_of(self.chosen).shared_limit


def stand_in(target: str):
    """A driver with a GPU of that kind, which is used from now on."""
    backend = targets.target_of(target).backend
    HipStandIn.chosen = target
    fake = HipStandIn() if backend == "hip" else fake_driver_python.CudaStandIn()
    if backend == "cuda":
        fake.set("capability", targets.target_of(target).arch)
        fake.set("shared_limit", targets.target_of(target).shared_limit)
        fake.make_current(0)
    driver.use_library(fake.library, backend)
    return fake


def launch(kernel) -> None:
    zeros = {"fp32": 0.0, "tensormap": bytes(128)}
    scratch = {"scratch": kernel.scratch_alignment * 2} if kernel.scratch_bytes(1) else {}
    kernel.launch(1, 0, tuple(zeros.get(kind, 0) for _, kind in kernel.params), **scratch)


def outcomes(profile: str, target: str) -> list[dict]:
    resolver = Resolver(
        settings=settings.get(),
        kernels_dir=PACKAGE / "kernels",
        version=__version__,
        aot_dir=PACKAGE / "_aot",
        declared=lambda name: frozenset(specs.declared_specs(profile, name)),
    )
    fake, rows = stand_in(target), []
    for spec in specs.declared_specs(profile, target).values():
        launch(driver.load(resolver.resolve(spec), 0))
        decision = resolver.decision(spec.key)
        rows.append({"key": spec.key, "source": decision.source, "rejected": [list(row) for row in decision.rejected]})
    if len(fake.launches()) != len(rows):
        raise AssertionError(f"{len(rows)} kernels, {len(fake.launches())} launches")
    return rows


sys.addaudithook(refuse_processes)
if Path(installed, "flashattn") != PACKAGE:
    raise AssertionError(f"the package in {PACKAGE} was imported")
report = {}
for manifest in sorted((PACKAGE / "_aot").glob("*/MANIFEST.json")):
    report[manifest.parent.name] = outcomes(json.loads(manifest.read_text())["profile"], manifest.parent.name)
print(json.dumps(report))
