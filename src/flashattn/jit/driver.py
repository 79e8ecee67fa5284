"""Loads artifacts and launches them with nothing but the GPU's driver: no compiler, no Triton, no PyTorch.

The caller makes the device current (its guard), allocates what the kernel writes, keeps every tensor alive until its
stream has passed the launch, and passes the stream that the tensors belong to.
"""

from __future__ import annotations

import ctypes
import os
import threading
from collections.abc import Callable
from dataclasses import dataclass

from . import driver_cuda, driver_hip
from .artifact import Artifact
from .driver_error import DriverError

__all__ = ["DeviceInfo", "DriverError", "LoadedKernel", "device_count", "device_info", "load", "use_library"]

_BACKENDS = {
    "cuda": (driver_cuda.LIBRARY, driver_cuda.CudaLibrary),
    "hip": (driver_hip.LIBRARY, driver_hip.HipLibrary),
}
_SCRATCH = ("global_scratch", "profile_scratch")


class _Tables:
    """What this process has opened and loaded. A forked child starts with empty tables: handles do not survive."""

    def __init__(self):
        self.lock = threading.RLock()
        self.libraries: dict = {}
        self.devices: dict = {}
        self.kernels: dict = {}


_tables = _Tables()
_replaced: dict = {}


def _forget() -> None:
    global _tables
    _tables = _Tables()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_forget)


def use_library(library, backend: str = "cuda") -> None:
    """Uses another driver library (a path, or an object with its functions) from now on; None: the system's again.

    For tests. Everything loaded so far is forgotten.
    """
    _replaced[backend] = library
    _forget()


def _library(backend: str):
    tables = _tables
    with tables.lock:
        if backend not in tables.libraries:
            name, opened_by = _BACKENDS[backend]
            chosen = _replaced.get(backend) or name
            try:
                handle = ctypes.CDLL(os.fspath(chosen)) if isinstance(chosen, (str, os.PathLike)) else chosen
            except OSError as error:
                raise DriverError(f"no GPU driver: {chosen} cannot be opened ({error})") from None
            tables.libraries[backend] = opened_by(handle)
        return tables.libraries[backend]


def _device(backend: str, device: int):
    tables = _tables
    with tables.lock:
        if (backend, device) not in tables.devices:
            tables.devices[backend, device] = _library(backend).open_device(device)
        return tables.devices[backend, device]


def cuda_device(device: int) -> driver_cuda.CudaDevice:
    """NVIDIA GPU `device`, opened once a process. Raises DriverError where there is none."""
    return _device("cuda", device)


@dataclass(frozen=True, slots=True)
class DeviceInfo:
    """A GPU as its driver describes it. Where `problem` is not None it says why nothing else is known.

    target: "sm_90", "gfx942". driver: "CUDA 13.0". shared_limit: bytes of shared memory for one block.
    """

    device: int
    backend: str
    name: str = ""
    target: str = ""
    driver: str = ""
    shared_limit: int = 0
    problem: str | None = None


def device_info(device: int, backend: str = "cuda") -> DeviceInfo:
    """What the driver says of GPU `device`. Makes no context; never raises: see `DeviceInfo.problem`."""
    try:
        gpu = _device(backend, device)
        version = _library(backend).version_text()
    except DriverError as error:
        return DeviceInfo(device, backend, problem=str(error))
    return DeviceInfo(device, backend, gpu.name, gpu.target, version, gpu.shared_limit)


def device_count(backend: str = "cuda") -> int:
    """The number of GPUs the driver shows this process. Raises DriverError where there is no driver."""
    return _library(backend).device_count()


class LoadedKernel:
    """A kernel on one device, ready to run.

    launch(grid_x, stream, args, scratch=0): runs `grid_x` programs on the stream whose handle is `stream`. `args` is
        one value for each of `params`: pointers and integers as int, floats as float, tensor maps as 128 bytes; a null
        pointer is 0. A grid of 0 does nothing. `scratch` is a pointer to `scratch_bytes(grid_x)` bytes of the device,
        aligned to `scratch_alignment`, for the kernels that need it. Nothing waits for the device, and any number of
        threads may call it at once. Raises TypeError and ValueError for wrong arguments, DriverError for the rest.
    label: the variant for people. device: the ordinal. target: what it was compiled for.
    """

    __slots__ = ("_module", "_scratch", "device", "label", "launch", "name", "params", "scratch_alignment", "target")

    launch: Callable

    def __init__(self, artifact: Artifact, gpu):
        meta = artifact.meta
        self.label = artifact.label
        self.name = meta["name"]
        self.target = meta["target"]
        self.device = gpu.device
        size, self.scratch_alignment = meta["global_scratch"]
        self._scratch = size * meta["num_ctas"]
        _refuse_misfit(self, meta, gpu)
        self._module, function = gpu.load(artifact.code, meta, self.label)
        zeros = _SCRATCH[1:] if size else _SCRATCH
        packer, launch = gpu.launcher(function, meta, zeros, self.label)
        self.params = tuple(param for param in packer.params if param[0] not in _SCRATCH)
        if size:
            launch = _with_scratch(launch, self)
        self.launch = _with_conversion(launch, packer, self.label) if packer.converts else launch

    def scratch_bytes(self, grid_x: int) -> int:
        """Bytes of device memory that a launch of `grid_x` programs needs besides its arguments."""
        return grid_x * self._scratch

    def __repr__(self) -> str:
        return f"<LoadedKernel {self.label} on device {self.device}>"


def _refuse_misfit(kernel: LoadedKernel, meta: dict, gpu) -> None:
    what = f"cannot load {kernel.label} on {gpu.title}"
    about = {"label": kernel.label, "device": gpu.device}
    if meta["target"] != gpu.target:
        raise DriverError(f"{what}: it was compiled for {meta['target']}, the device is {gpu.target}", **about)
    if meta["shared"] > gpu.shared_limit:
        text = f"it wants {meta['shared']} bytes of shared memory, the device allows {gpu.shared_limit}"
        raise DriverError(f"{what}: {text}; smaller tiles or fewer stages are needed", **about)
    if meta["profile_scratch"][0]:
        raise DriverError(f"{what}: it was compiled with profiling, which a launch does not support", **about)


def _with_scratch(launch: Callable, kernel: LoadedKernel) -> Callable:
    label, needed, alignment = kernel.label, kernel.scratch_bytes, kernel.scratch_alignment

    def launch_with_scratch(grid_x, stream, args, scratch=0):
        if grid_x and (not scratch or scratch % alignment):
            wanted = f"{needed(grid_x)} bytes of the device's memory, aligned to {alignment}"
            raise ValueError(f"{label}: scratch must be the address of {wanted}; got {scratch}")
        launch(grid_x, stream, (*args, scratch))

    return launch_with_scratch


def _with_conversion(launch: Callable, packer, label: str) -> Callable:
    def launch_converted(grid_x, stream, args, scratch=0):
        try:
            values = packer.convert(args)
        except (TypeError, ValueError, OverflowError, IndexError):
            raise TypeError(f"{label}: {packer.complaint(args)}") from None
        launch(grid_x, stream, values, scratch)

    return launch_converted


def load(artifact: Artifact, device: int) -> LoadedKernel:
    """The artifact on GPU `device`, loaded once a process; from any thread, whichever device is current.

    Allowed while a CUDA graph is captured. Raises DriverError naming kernel, variant and device.
    """
    tables = _tables
    key = (artifact.key, artifact.meta["code_sha256"], device)
    kernel = tables.kernels.get(key)
    if kernel is None:
        with tables.lock:
            kernel = tables.kernels.get(key)
            if kernel is None:
                backend = "cuda" if artifact.meta["kind"] == "cubin" else "hip"
                kernel = tables.kernels[key] = LoadedKernel(artifact, _device(backend, device))
    return kernel
