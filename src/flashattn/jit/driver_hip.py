"""AMD's runtime through ctypes: devices, modules and launches of hsaco files."""

from __future__ import annotations

import contextlib
import ctypes
from ctypes import POINTER, byref, c_char_p, c_int, c_size_t, c_uint, c_void_p

from .driver_error import DriverError, refused
from .packer import PACK_ERRORS, Packer

LIBRARY = "libamdhip64.so"

_SHARED_LIMIT = 74  # hipDeviceAttributeMaxSharedMemoryPerBlock
_ARCH_OFFSET = 1160  # of gcnArchName in hipDeviceProp_tR0600, which has 1472 bytes
_PROPERTY_BYTES = 4096
_CAPTURE_RELAXED = 2
_MAX_GRID = 2**31 - 1
_MAX_GRID_THREADS = 2**32 - 1

_PROTOTYPES = {
    "hipInit": [c_uint],
    "hipDriverGetVersion": [POINTER(c_int)],
    "hipGetDeviceCount": [POINTER(c_int)],
    "hipDeviceGetName": [c_char_p, c_int, c_int],
    "hipDeviceGetAttribute": [POINTER(c_int), c_int, c_int],
    "hipGetDevicePropertiesR0600": [c_char_p, c_int],
    "hipGetDevice": [POINTER(c_int)],
    "hipSetDevice": [c_int],
    "hipThreadExchangeStreamCaptureMode": [POINTER(c_int)],
    "hipModuleLoadData": [POINTER(c_void_p), c_char_p],
    "hipModuleGetFunction": [POINTER(c_void_p), c_void_p, c_char_p],
    "hipModuleLaunchKernel": [c_void_p, *[c_uint] * 7, c_size_t, c_void_p, c_void_p],
    "hipGetErrorName": [c_int],
    "hipGetErrorString": [c_int],
}


class HipLibrary:
    """libamdhip64, initialised. `library` is a ctypes library or an object with the same functions."""

    backend = "hip"

    def __init__(self, library):
        self.library = library
        try:
            for name, types in _PROTOTYPES.items():
                getattr(library, name).argtypes = types
        except AttributeError as error:
            raise DriverError(f"the GPU runtime is too old: {error}; ROCm 6 or newer is needed") from None
        library.hipGetErrorName.restype = library.hipGetErrorString.restype = c_char_p
        self.check(library.hipInit(0), "cannot initialise the GPU runtime")

    def check(self, code: int, what: str, **about) -> None:
        """Raises DriverError unless `code` is 0."""
        if code:
            raise self.error(code, what, **about)

    def error(self, code: int, what: str, **about) -> DriverError:
        name, text = self.library.hipGetErrorName(code), self.library.hipGetErrorString(code)
        return refused(what, code, (name or b"unknown").decode(), (text or b"unknown").decode(), **about)

    def version_text(self) -> str:
        version = c_int()
        self.check(self.library.hipDriverGetVersion(byref(version)), "cannot read the runtime's version")
        major, rest = divmod(version.value, 10_000_000)
        return f"HIP {major}.{rest // 100_000}"

    def device_count(self) -> int:
        count = c_int()
        self.check(self.library.hipGetDeviceCount(byref(count)), "cannot count the GPUs")
        return count.value

    def open_device(self, device: int) -> HipDevice:
        return HipDevice(self, device)


class HipDevice:
    """One GPU: `device` is its ordinal. `target` is as in "gfx942"; `shared_limit` is bytes for one block."""

    def __init__(self, api: HipLibrary, device: int):
        self.api = api
        self.device = device
        name, properties = ctypes.create_string_buffer(256), ctypes.create_string_buffer(_PROPERTY_BYTES)
        limit = c_int()
        what = f"cannot open hip:{device}"
        api.check(api.library.hipGetDevicePropertiesR0600(properties, device), what, device=device)
        api.check(api.library.hipDeviceGetName(name, len(name), device), what, device=device)
        api.check(api.library.hipDeviceGetAttribute(byref(limit), _SHARED_LIMIT, device), what, device=device)
        self.name = name.value.decode(errors="replace")
        self.title = f"hip:{device} ({self.name})"
        # "gfx942:sramecc+:xnack-"
        arch = properties.raw[_ARCH_OFFSET : _ARCH_OFFSET + 256].split(b"\0")[0]
        self.target = arch.decode(errors="replace").split(":")[0]
        self.shared_limit = limit.value

    @contextlib.contextmanager
    def _current(self):
        library, before = self.api.library, c_int()
        self.api.check(library.hipGetDevice(byref(before)), "cannot read the current device", device=self.device)
        self.api.check(library.hipSetDevice(self.device), f"cannot switch to {self.title}", device=self.device)
        try:
            yield
        finally:
            library.hipSetDevice(before)

    @contextlib.contextmanager
    def _uncaptured(self):
        mode = c_int(_CAPTURE_RELAXED)
        code = self.api.library.hipThreadExchangeStreamCaptureMode(byref(mode))
        self.api.check(code, f"cannot prepare {self.title} for loading", device=self.device)
        try:
            yield
        finally:
            self.api.library.hipThreadExchangeStreamCaptureMode(byref(mode))

    def load(self, code: bytes, meta: dict, label: str):
        """(module, function) of an hsaco."""
        library, about = self.api.library, {"label": label, "device": self.device}
        what = f"cannot load {label} on {self.title}"
        if meta["num_ctas"] > 1 or meta["pdl"] or meta["cooperative"]:
            raise DriverError(f"{what}: clusters, programmatic and cooperative launches are NVIDIA's only", **about)
        module, function = c_void_p(), c_void_p()
        with self._current(), self._uncaptured():
            self.api.check(library.hipModuleLoadData(byref(module), code), what, **about)
            found = library.hipModuleGetFunction(byref(function), module, meta["name"].encode())
            self.api.check(found, f"{what} (its function {meta['name']!r})", **about)
        return module, function

    def launcher(self, function: c_void_p, meta: dict, zeros, label: str):
        """The packer of a loaded kernel, and the function that launches it."""
        packer = Packer(meta["params"], zeros=zeros)
        block, shared = meta["num_warps"] * meta["warp_size"], meta["shared"]
        call = self.api.library.hipModuleLaunchKernel
        limit = min(_MAX_GRID, _MAX_GRID_THREADS // block)
        free: list = []

        def launch(grid_x, stream, args, scratch=0):
            if not 0 < grid_x <= limit:
                if grid_x == 0:
                    return
                raise ValueError(f"{label}: a grid has 0 to {limit} programs, got {grid_x}")
            try:
                slot = free.pop()
            except IndexError:
                slot = packer.slot()
            pack, _, pointers = slot
            try:
                pack(*args)
                code = call(function, grid_x, 1, 1, block, 1, 1, shared, stream, pointers, None)
            except (*PACK_ERRORS, ctypes.ArgumentError):
                raise TypeError(f"{label}: {packer.complaint(args)}") from None
            if code:
                what = f"cannot launch {label} on {self.title} with grid ({grid_x}, 1, 1), block {block}"
                raise self.api.error(code, what, label=label, device=self.device)
            free.append(slot)

        return packer, launch
