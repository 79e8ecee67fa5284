"""NVIDIA's driver through ctypes: devices, modules and launches of cubins."""

from __future__ import annotations

import contextlib
import ctypes
import math
import struct
from ctypes import POINTER, byref, c_char_p, c_int, c_size_t, c_uint, c_void_p

from .driver_error import DriverError, refused
from .packer import PACK_ERRORS, Packer

LIBRARY = "libcuda.so.1"

_INVALID_CONTEXT = 201
_CAPABILITY_MAJOR, _CAPABILITY_MINOR, _SHARED_OPTIN = 75, 76, 97  # CUdevice_attribute
_MAX_DYNAMIC_SHARED, _NON_PORTABLE_CLUSTER = 8, 14  # CUfunction_attribute
_COOPERATIVE, _CLUSTER, _CLUSTER_POLICY, _PROGRAMMATIC_SERIALIZATION = 2, 4, 5, 6  # CUlaunchAttributeID
_POLICY_SPREAD = 1
_CAPTURE_RELAXED = 2
_SHARED_WITHOUT_ASKING = 48 * 1024
_PORTABLE_CLUSTER = 8
_MAX_GRID = 2**31 - 1

# CUlaunchConfig: gridDimX | gridDimY to sharedMemBytes, padding | hStream | attrs, numAttrs, padding; then up to 64.
_CONFIG = "I28sQ16s8x"

_PROTOTYPES = {
    "cuInit": [c_uint],
    "cuDriverGetVersion": [POINTER(c_int)],
    "cuDeviceGetCount": [POINTER(c_int)],
    "cuDeviceGet": [POINTER(c_int), c_int],
    "cuDeviceGetName": [c_char_p, c_int, c_int],
    "cuDeviceGetAttribute": [POINTER(c_int), c_int, c_int],
    "cuDevicePrimaryCtxRetain": [POINTER(c_void_p), c_int],
    "cuCtxGetCurrent": [POINTER(c_void_p)],
    "cuCtxSetCurrent": [c_void_p],
    "cuThreadExchangeStreamCaptureMode": [POINTER(c_int)],
    "cuModuleLoadData": [POINTER(c_void_p), c_char_p],
    "cuModuleGetFunction": [POINTER(c_void_p), c_void_p, c_char_p],
    "cuFuncSetAttribute": [c_void_p, c_int, c_int],
    "cuGetErrorName": [c_int, POINTER(c_char_p)],
    "cuGetErrorString": [c_int, POINTER(c_char_p)],
}


class CudaLibrary:
    """libcuda, initialised. `library` is a ctypes library or an object with the same functions."""

    backend = "cuda"

    def __init__(self, library):
        self.library = library
        try:
            for name, types in _PROTOTYPES.items():
                getattr(library, name).argtypes = types
            # Has no argtypes: its arguments are ready-made pointers, and converting them would cost more than the call.
            self.launch_kernel = library.cuLaunchKernelEx
        except AttributeError as error:
            raise DriverError(f"the GPU driver is too old: {error}; 520 or newer is needed") from None
        self.check(library.cuInit(0), "cannot initialise the GPU driver")

    def check(self, code: int, what: str, **about) -> None:
        """Raises DriverError unless `code` is 0."""
        if code:
            raise self.error(code, what, **about)

    def error(self, code: int, what: str, **about) -> DriverError:
        name, text = c_char_p(), c_char_p()
        self.library.cuGetErrorName(code, byref(name))
        self.library.cuGetErrorString(code, byref(text))
        return refused(what, code, (name.value or b"unknown").decode(), (text.value or b"unknown").decode(), **about)

    def driver_version(self) -> int:
        """The CUDA version of the driver: 13010 is 13.1."""
        version = c_int()
        self.check(self.library.cuDriverGetVersion(byref(version)), "cannot read the driver's version")
        return version.value

    def version_text(self) -> str:
        version = self.driver_version()
        return f"CUDA {version // 1000}.{version % 1000 // 10}"

    def device_count(self) -> int:
        count = c_int()
        self.check(self.library.cuDeviceGetCount(byref(count)), "cannot count the GPUs")
        return count.value

    def open_device(self, device: int) -> CudaDevice:
        return CudaDevice(self, device)


class CudaDevice:
    """One GPU: `device` is its ordinal. `target` is as in "sm_90"; `shared_limit` is bytes for one block."""

    def __init__(self, api: CudaLibrary, device: int):
        self.api = api
        self.device = device
        handle = c_int()
        api.check(api.library.cuDeviceGet(byref(handle), device), f"cannot open cuda:{device}", device=device)
        self._handle = handle.value
        name = ctypes.create_string_buffer(256)
        api.check(api.library.cuDeviceGetName(name, len(name), handle), f"cannot name cuda:{device}", device=device)
        self.name = name.value.decode(errors="replace")
        self.title = f"cuda:{device} ({self.name})"
        self.target = f"sm_{self._attribute(_CAPABILITY_MAJOR)}{self._attribute(_CAPABILITY_MINOR)}"
        self.shared_limit = self._attribute(_SHARED_OPTIN)
        self._context: c_void_p | None = None

    def _attribute(self, which: int) -> int:
        value = c_int()
        code = self.api.library.cuDeviceGetAttribute(byref(value), which, self._handle)
        self.api.check(code, f"cannot query {self.title}", device=self.device)
        return value.value

    def _primary(self) -> c_void_p:
        """The context that PyTorch uses too. Retained once and for ever."""
        if self._context is None:
            context = c_void_p()
            code = self.api.library.cuDevicePrimaryCtxRetain(byref(context), self._handle)
            self.api.check(code, f"cannot get the context of {self.title}", device=self.device)
            self._context = context
        return self._context

    @contextlib.contextmanager
    def _current(self, keep: bool = False):
        """The device's primary context is current; then what was so before, unless that was none and `keep` is set."""
        library, before = self.api.library, c_void_p()
        self.api.check(library.cuCtxGetCurrent(byref(before)), "cannot read the current context", device=self.device)
        code = library.cuCtxSetCurrent(self._primary())
        self.api.check(code, f"cannot set the context of {self.title}", device=self.device)
        try:
            yield
        finally:
            if before.value or not keep:
                library.cuCtxSetCurrent(before)

    @contextlib.contextmanager
    def _uncaptured(self):
        """Lets this thread load during the capture of a CUDA graph: loading touches no stream of the capture."""
        mode = c_int(_CAPTURE_RELAXED)
        code = self.api.library.cuThreadExchangeStreamCaptureMode(byref(mode))
        self.api.check(code, f"cannot prepare {self.title} for loading", device=self.device)
        try:
            yield
        finally:
            self.api.library.cuThreadExchangeStreamCaptureMode(byref(mode))

    def again(self, call) -> int:
        """The code of `call()`, made with this device's context current; it stays so on a thread that had none."""
        with self._current(keep=True):
            return call()

    def encode_tiled(self, arguments: tuple) -> int:
        """The code of cuTensorMapEncodeTiled, which wants a current context too."""
        encode = getattr(self.api.library, "cuTensorMapEncodeTiled", None)
        if encode is None:
            raise DriverError("the GPU driver is too old for tensor maps: 525 or newer is needed", device=self.device)
        encode.argtypes = [c_void_p, c_int, c_uint, *[c_void_p] * 5, *[c_int] * 4]
        code = encode(*arguments)
        return self.again(lambda: encode(*arguments)) if code == _INVALID_CONTEXT else code

    def zero(self, address: int, words: int, stream: int) -> None:
        """Set `words` times 4 bytes to 0 in the order of `stream`, inside a capture too. Loads no kernel for it."""
        clear = self.api.library.cuMemsetD32Async
        clear.argtypes = [c_void_p, c_uint, c_size_t, c_void_p]
        code = clear(address, 0, words, stream)
        code = self.again(lambda: clear(address, 0, words, stream)) if code == _INVALID_CONTEXT else code
        self.api.check(code, f"cannot set {4 * words} bytes of {self.title} to zero", device=self.device)

    def load(self, code: bytes, meta: dict, label: str):
        """(module, function) of a cubin, able to use all the shared memory it asks for."""
        library, about = self.api.library, {"label": label, "device": self.device}
        what = f"cannot load {label} on {self.title}"
        module, function = c_void_p(), c_void_p()
        with self._current(), self._uncaptured():
            self.api.check(library.cuModuleLoadData(byref(module), code), what, **about)
            found = library.cuModuleGetFunction(byref(function), module, meta["name"].encode())
            self.api.check(found, f"{what} (its function {meta['name']!r})", **about)
            if meta["shared"] > _SHARED_WITHOUT_ASKING:
                set_to = library.cuFuncSetAttribute(function, _MAX_DYNAMIC_SHARED, meta["shared"])
                self.api.check(set_to, f"{what} ({meta['shared']} bytes of shared memory)", **about)
            if math.prod(meta["cluster"]) > _PORTABLE_CLUSTER:
                set_to = library.cuFuncSetAttribute(function, _NON_PORTABLE_CLUSTER, 1)
                self.api.check(set_to, f"{what} (a cluster of {meta['cluster']})", **about)
            # Else the driver may load the code at the first launch, which can be inside a capture. From CUDA 12.4 on.
            finish = getattr(library, "cuFuncLoad", None)
            if finish is not None:
                self.api.check(finish(function), what, **about)
        return module, function

    def launcher(self, function: c_void_p, meta: dict, zeros, label: str):
        """The packer of a loaded kernel, and the function that launches it."""
        packer = Packer(meta["params"], head=_CONFIG, zeros=zeros)
        block = meta["num_warps"] * meta["warp_size"]
        middle = struct.pack("<6I4x", 1, 1, block, 1, 1, meta["shared"])
        attributes = _attributes(meta)
        tail = struct.pack("<QI4x", ctypes.addressof(attributes) if attributes else 0, len(attributes or ()) // 72)
        clusters, call = meta["num_ctas"], self.api.launch_kernel
        limit = _MAX_GRID // clusters
        # Slots that no launch is using. ctypes lets other threads run during the call, so each launch takes one for
        # itself; taking from and adding to a list are atomic, and there are as many slots as launches ever ran at once.
        free: list = []
        take, give = free.pop, free.append

        def new_slot():
            pack, buffer, pointers = packer.slot()
            return pack, byref(buffer), byref(pointers)

        def failed(code, grid_x, config, pointers):
            if code == _INVALID_CONTEXT:
                code = self.again(lambda: call(config, function, pointers, None))
            what = f"cannot launch {label} on {self.title} with grid ({grid_x}, 1, 1), block {block}"
            self.api.check(code, what, label=label, device=self.device)

        def launch(grid_x, stream, args, scratch=0):
            if not 0 < grid_x <= limit:
                if grid_x == 0:
                    return
                raise ValueError(f"{label}: a grid has 0 to {limit} programs, got {grid_x}")
            try:
                slot = take()
            except IndexError:
                slot = new_slot()
            pack, config, pointers = slot
            try:
                pack(grid_x * clusters, middle, stream, tail, *args)
            except PACK_ERRORS:
                raise TypeError(f"{label}: {packer.complaint(args)}") from None
            code = call(config, function, pointers, None)
            if code:
                failed(code, grid_x, config, pointers)
            give(slot)

        launch.attributes = attributes  # `tail` has their address
        return packer, launch


def _attributes(meta: dict):
    """The array of CUlaunchAttribute (id, padding, 64 bytes of value) that the kernel is launched with, or None."""
    wanted = []
    if meta["pdl"]:
        wanted.append((_PROGRAMMATIC_SERIALIZATION, (1,)))
    if meta["cooperative"]:
        wanted.append((_COOPERATIVE, (1,)))
    if math.prod(meta["cluster"]) > 1:
        wanted.append((_CLUSTER, tuple(meta["cluster"])))
        wanted.append((_CLUSTER_POLICY, (_POLICY_SPREAD,)))
    data = b"".join(struct.pack("<I4x64s", which, struct.pack(f"<{len(v)}I", *v)) for which, v in wanted)
    return ctypes.create_string_buffer(data, len(data)) if data else None
