"""A stand-in for a GPU driver, in C, and artifacts that it loads. fake_libcuda.c names the rules it keeps."""

from __future__ import annotations

import ctypes
import hashlib
import json
import shutil
import subprocess
from ctypes import c_int, c_void_p, sizeof
from dataclasses import dataclass
from pathlib import Path

from flashattn.jit.artifact import Artifact
from flashattn.jit.spec import KernelSpec


@dataclass(frozen=True)
class Call:
    """One line of a stand-in's log: the function and what it noted."""

    function: str
    fields: dict

    def __getattr__(self, name):
        try:
            value = self.fields[name]
        except KeyError:
            raise AttributeError(name) from None
        if name in ("grid", "block"):
            return tuple(int(number) for number in value.split(","))
        if name == "params":
            return [bytes.fromhex(part) for part in value.split(",")] if value else []
        if name == "attributes":
            return {int(a[0]): tuple(map(int, a[1:])) for a in (part.split(":") for part in value.split(",") if part)}
        return int(value) if value.lstrip("-").isdigit() else value


class Log:
    """What a test asks of a stand-in."""

    def calls(self, function: str | None = None) -> list[Call]:
        lines = [line.split(" ") for line in self.text().splitlines()]
        made = [Call(line[0], dict(part.split("=", 1) for part in line[1:])) for line in lines]
        return [call for call in made if function in (None, call.function)]

    def launches(self) -> list[Call]:
        made = self.calls("cuLaunchKernelEx") + self.calls("hipModuleLaunchKernel")
        return [call for call in made if "failed" not in call.fields]


class CStandIn(Log):
    """fake_libcuda.c, compiled: `library` is its path. Two at different paths share nothing."""

    def __init__(self, library: Path):
        self.library = str(library)
        self._handle = ctypes.CDLL(self.library)
        self._handle.stub_log.restype = ctypes.c_char_p
        self._handle.stub_set.argtypes = [ctypes.c_char_p, c_int, ctypes.c_long]

    def set(self, name: str, value: int, index: int = 0) -> None:
        self._handle.stub_set(name.encode(), index, value)

    def fail(self, function: str, code: int, times: int = 1) -> None:
        self._handle.stub_fail(function.encode(), code, times)

    def text(self) -> str:
        return self._handle.stub_log().decode()

    def current(self) -> int:
        """The device whose context is current on this thread, or -1."""
        context = c_void_p()
        self._handle.cuCtxGetCurrent(ctypes.byref(context))
        return c_int.from_address(context.value).value if context.value else -1

    def make_current(self, device: int) -> None:
        """What PyTorch does when a device is chosen; -1: a thread that has not chosen one."""
        context = c_void_p()
        if device >= 0:
            self._handle.cuDevicePrimaryCtxRetain(ctypes.byref(context), device)
        self._handle.cuCtxSetCurrent(context)


def build(folder: Path, name: str = "libcuda.so.1") -> Path:
    """fake_libcuda.c as a shared library in `folder`."""
    made = Path(folder) / name
    source = Path(__file__).with_name("fake_libcuda.c")
    subprocess.run(["gcc", "-O1", "-shared", "-fPIC", "-pthread", "-o", made, source], check=True)
    return made


NO_COMPILER = "gcc is not here to build fake_libcuda.c"
HAS_COMPILER = shutil.which("gcc") is not None


SIZES = {"i1": 1, "i8": 1, "i16": 2, "i32": 4, "i64": 8, "fp16": 2, "bf16": 2, "fp32": 4, "fp64": 8, "tensormap": 128}


def size_of(kind: str) -> int:
    return sizeof(c_void_p) if kind.startswith("*") else SIZES[kind]


def artifact(params=(("x_ptr", "*bf16"), ("n", "i32")), *, kernel: str = "probe", target: str = "sm_90", **changes):
    """An artifact whose code the stand-ins can load. `params` without the scratch pointers, which every kernel has."""
    spec = KernelSpec(
        module="kernels.probe",
        kernel=kernel,
        signature=tuple(params),
        constants=(("BLOCK_M", 128),),
        alignment=(),
        options=(("num_warps", 4),),
        target=target,
    )
    params = [*map(list, params), ["global_scratch", "*u8"], ["profile_scratch", "*u8"]]
    code = ("FAKE:" + ",".join(str(size_of(kind)) for _, kind in params)).encode()
    hip = target.startswith("gfx")
    meta = {
        "schema": 1,
        "artifact_key": hashlib.sha256(json.dumps([params, kernel, target, str(changes)]).encode()).hexdigest(),
        "spec_key": spec.key,
        "source_digest": "0" * 64,
        "toolchain": {"triton": "0", "env": {}},
        "spec": spec.to_json(),
        "name": kernel,
        "kind": "hsaco" if hip else "cubin",
        "code_sha256": hashlib.sha256(code).hexdigest(),
        "code_bytes": len(code),
        "target": target,
        "params": params,
        "num_warps": 4,
        "warp_size": 64 if hip else 32,
        "shared": 0,
        "num_ctas": 1,
        "cluster": [1, 1, 1],
        "pdl": False,
        "cooperative": False,
        "global_scratch": [0, 1],
        "profile_scratch": [0, 1],
        "tensor_maps": [],
    }
    code = changes.pop("code", code)
    meta.update(changes)
    return Artifact(code, meta)
