"""Stand-ins for the GPU drivers as ctypes callbacks: libcuda for machines without a C compiler, and libamdhip64.

The rules are those of fake_libcuda.c, which names them; the lines written down are the same too.
"""

from __future__ import annotations

import ctypes
import hashlib
import os
import threading
from ctypes import CFUNCTYPE, c_char, c_int, c_size_t, c_uint, c_uint64, c_void_p, string_at

from fake_driver import Log

ERRORS = {
    1: ("CUDA_ERROR_INVALID_VALUE", "invalid argument"),
    2: ("CUDA_ERROR_OUT_OF_MEMORY", "out of memory"),
    3: ("CUDA_ERROR_NOT_INITIALIZED", "initialization error"),
    100: ("CUDA_ERROR_NO_DEVICE", "no CUDA-capable device is detected"),
    101: ("CUDA_ERROR_INVALID_DEVICE", "invalid device ordinal"),
    200: ("CUDA_ERROR_INVALID_IMAGE", "device kernel image is invalid"),
    201: ("CUDA_ERROR_INVALID_CONTEXT", "invalid device context"),
    209: ("CUDA_ERROR_NO_BINARY_FOR_GPU", "no kernel image is available for execution on the device"),
    218: ("CUDA_ERROR_INVALID_PTX", "a PTX JIT compilation failed"),
    222: ("CUDA_ERROR_UNSUPPORTED_PTX_VERSION", "the provided PTX was compiled with an unsupported toolchain."),
    400: ("CUDA_ERROR_INVALID_HANDLE", "invalid resource handle"),
    500: ("CUDA_ERROR_NOT_FOUND", "named symbol not found"),
    700: ("CUDA_ERROR_ILLEGAL_ADDRESS", "an illegal memory access was encountered"),
    701: ("CUDA_ERROR_LAUNCH_OUT_OF_RESOURCES", "too many resources requested for launch"),
    716: ("CUDA_ERROR_MISALIGNED_ADDRESS", "misaligned address"),
    719: ("CUDA_ERROR_LAUNCH_FAILED", "unspecified launch failure"),
    900: ("CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED", "operation not permitted when stream is capturing"),
    901: ("CUDA_ERROR_STREAM_CAPTURE_INVALIDATED", "operation failed due to a previous error during capture"),
}


class _Config(ctypes.Structure):
    _fields_ = [("grid", c_uint * 3), ("block", c_uint * 3), ("shared", c_uint), ("stream", c_void_p)]
    _fields_ += [("attributes", c_void_p), ("count", c_uint)]


class PythonStandIn(Log):
    """The same rules as ctypes callbacks. `library` is an object whose attributes are the driver's functions."""

    prefix = "cu"

    def __init__(self):
        self.settings = {"devices": 2, "version": 13000, "shared_limit": 232448, "capturing": 0, "recording": 1}
        self.capability = dict.fromkeys(range(8), 90)
        self.failures: list = []
        self.lines: list[str] = []
        self.owner: int | None = None
        self.modules: dict[int, dict] = {}
        self.thread = threading.local()
        self._texts = {code: tuple(ctypes.create_string_buffer(t.encode()) for t in ERRORS[code]) for code in ERRORS}
        self.library = self._functions()

    def _functions(self):
        class Library:
            pass

        library = Library()
        for name in dir(type(self)):
            method = getattr(self, name)
            if name.startswith(self.prefix) and hasattr(method, "types"):
                setattr(library, name, CFUNCTYPE(method.result, *method.types)(self._guarded(name, method)))
        return library

    def _guarded(self, name, method):
        def call(*args):
            if self.owner not in (None, os.getpid()):
                return 3
            for failure in self.failures:
                if failure[0] == name and failure[2]:
                    failure[2] -= 1
                    self.note(f"{name} failed={failure[1]}")
                    return failure[1]
            try:
                return method(*args) or 0
            except Exception as error:  # ctypes would print it and return 0
                self.lines.append(f"broken {type(error).__name__}={error}")
                return 999

        return call

    def note(self, line: str) -> None:
        if self.settings["recording"]:
            self.lines.append(line)

    def where(self) -> str:
        return f"device={self.current()} mode={getattr(self.thread, 'mode', 0)}"

    def set(self, name: str, value: int, index: int = 0) -> None:
        if name == "capability":
            self.capability[index] = value
        else:
            self.settings[name] = value

    def fail(self, function: str, code: int, times: int = 1) -> None:
        self.failures.append([function, code, times])

    def text(self) -> str:
        return "\n".join(self.lines)

    def current(self) -> int:
        return getattr(self.thread, "current", -1)

    def make_current(self, device: int) -> None:
        self.thread.current = device


def _function(*types, result=c_int):
    def mark(method):
        method.types, method.result = types, result
        return method

    return mark


def _put(address: int, value: int, kind=c_int) -> None:
    kind.from_address(address).value = value


def _shown(params: int, sizes) -> tuple[int, str]:
    addresses = (c_void_p * len(sizes)).from_address(params)
    for address, size in zip(addresses, sizes, strict=True):
        if address % min(size, 64):
            return 716, ""
    return 0, ",".join(string_at(address, size).hex() for address, size in zip(addresses, sizes, strict=True))


class CudaStandIn(PythonStandIn):
    """libcuda in Python. A context is its device's ordinal + 1, a module and its function a number."""

    @_function(c_uint)
    def cuInit(self, flags):
        self.owner = os.getpid()
        self.note("cuInit")

    @_function(c_void_p)
    def cuDriverGetVersion(self, out):
        _put(out, self.settings["version"])

    @_function(c_void_p)
    def cuDeviceGetCount(self, out):
        _put(out, self.settings["devices"])

    @_function(c_void_p, c_int)
    def cuDeviceGet(self, out, ordinal):
        if not 0 <= ordinal < self.settings["devices"]:
            return 101 if self.settings["devices"] else 100
        _put(out, ordinal)
        return 0

    @_function(c_void_p, c_int, c_int)
    def cuDeviceGetName(self, out, size, device):
        name = f"Stand-in {device}\0".encode()
        ctypes.memmove(out, name, min(size, len(name)))

    @_function(c_void_p, c_int, c_int)
    def cuDeviceGetAttribute(self, out, which, device):
        major, minor = divmod(self.capability[device], 10)
        _put(out, {75: major, 76: minor, 97: self.settings["shared_limit"]}[which])

    @_function(c_void_p, c_int)
    def cuDevicePrimaryCtxRetain(self, out, device):
        _put(out, device + 1, c_uint64)
        self.note(f"cuDevicePrimaryCtxRetain of={device} {self.where()}")

    @_function(c_void_p)
    def cuCtxGetCurrent(self, out):
        _put(out, self.current() + 1, c_uint64)

    @_function(c_void_p)
    def cuCtxSetCurrent(self, context):
        self.thread.current = (context or 0) - 1
        self.note(f"cuCtxSetCurrent {self.where()}")

    @_function(c_void_p)
    def cuThreadExchangeStreamCaptureMode(self, exchanged):
        mode = c_int.from_address(exchanged)
        self.thread.mode, mode.value = mode.value, getattr(self.thread, "mode", 0)
        self.note(f"cuThreadExchangeStreamCaptureMode {self.where()}")

    @_function(c_void_p, c_void_p)
    def cuModuleLoadData(self, out, image):
        self.note(f"cuModuleLoadData {self.where()}")
        if self.current() < 0:
            return 201
        if self.settings["capturing"] and getattr(self.thread, "mode", 0) != 2:
            return 900
        return self.add_module(out, image)

    def add_module(self, out, image):
        data = string_at(image)
        if not data.startswith((b"FAKE:", b"\x7fELF")):
            return 200
        sizes = [int(size) for size in data[5:].split(b",")] if data.startswith(b"FAKE:") and data[5:] else []
        handle = 0x1000 + len(self.modules)
        self.modules[handle] = {"device": self.current(), "sizes": sizes, "shared": 0, "name": ""}
        _put(out, handle, c_uint64)
        return 0

    @_function(c_void_p, c_void_p, ctypes.c_char_p)
    def cuModuleGetFunction(self, out, module, name):
        self.note(f"{self.prefix}ModuleGetFunction name={name.decode()} {self.where()}")
        if name == b"missing":
            return 500
        self.modules[module]["name"] = name.decode()
        _put(out, module, c_uint64)
        return 0

    @_function(c_void_p, c_int, c_int)
    def cuFuncSetAttribute(self, function, which, value):
        self.note(f"cuFuncSetAttribute which={which} value={value} {self.where()}")
        if which == 8:
            self.modules[function]["shared"] = value

    @_function(c_void_p)
    def cuFuncLoad(self, function):
        self.note(f"cuFuncLoad {self.where()}")

    @_function(c_void_p, c_void_p, c_void_p, c_void_p)
    def cuLaunchKernelEx(self, config, function, params, extra):
        config, function = _Config.from_address(config), self.modules[function]
        if self.current() < 0:
            return 201
        if self.current() != function["device"]:
            return 400
        if not config.grid[0] or config.shared > max(49152, function["shared"]):
            return 1
        code, shown = _shown(params, function["sizes"])
        grid, block = ",".join(map(str, config.grid)), ",".join(map(str, config.block))
        words = [(c_uint * 18).from_address(config.attributes + 72 * i) for i in range(config.count)]
        attributes = ",".join(f"{w[0]}:{w[2]}:{w[3]}:{w[4]}" for w in words)
        if not code:
            self.note(
                f"cuLaunchKernelEx name={function['name']} grid={grid} block={block} shared={config.shared} "
                f"stream={config.stream or 0} attributes={attributes} params={shown} {self.where()}"
            )
        return code

    @_function(c_void_p, c_int, c_uint, *[c_void_p] * 5, *[c_int] * 4)
    def cuTensorMapEncodeTiled(self, made, dtype, rank, address, shape, strides, box, steps, *options):
        self.note(f"cuTensorMapEncodeTiled address={address} {self.where()}")
        if self.current() < 0:
            return 201
        if made % 64:
            return 1
        sizes = (*(c_uint64 * rank).from_address(shape), *(c_uint64 * (rank - 1)).from_address(strides))
        boxes = (*(c_uint * rank).from_address(box), *(c_uint * rank).from_address(steps))
        told = hashlib.sha256(repr((dtype, sizes, boxes, options)).encode()).digest()
        (c_char * 128).from_address(made).raw = address.to_bytes(8, "little") + b"\xff" * 8 + told + bytes(80)
        return 0

    @_function(c_void_p, c_uint, c_size_t, c_void_p)
    def cuMemsetD32Async(self, address, value, words, stream):
        self.note(f"cuMemsetD32Async address={address} value={value} words={words} stream={stream or 0} {self.where()}")
        return 0 if self.current() >= 0 else 201

    @_function(c_int, c_void_p)
    def cuGetErrorName(self, code, out):
        _put(out, ctypes.addressof(self._texts[code][0]), c_uint64)

    @_function(c_int, c_void_p)
    def cuGetErrorString(self, code, out):
        _put(out, ctypes.addressof(self._texts[code][1]), c_uint64)


class HipStandIn(CudaStandIn):
    """libamdhip64 in Python. A device is current on every thread, the first one at the start."""

    prefix = "hip"

    def current(self) -> int:
        return getattr(self.thread, "current", 0)

    hipInit = CudaStandIn.cuInit
    hipGetDeviceCount = CudaStandIn.cuDeviceGetCount
    hipModuleGetFunction = CudaStandIn.cuModuleGetFunction

    @_function(c_void_p)
    def hipDriverGetVersion(self, out):
        _put(out, 60443484)

    @_function(c_void_p, c_int, c_int)
    def hipDeviceGetName(self, out, size, device):
        return self.cuDeviceGetName(out, size, device)

    @_function(c_void_p, c_int, c_int)
    def hipDeviceGetAttribute(self, out, which, device):
        _put(out, {74: 65536}[which])

    @_function(c_void_p, c_int)
    def hipGetDevicePropertiesR0600(self, out, device):
        if not 0 <= device < self.settings["devices"]:
            return 101
        ctypes.memmove(out + 1160, b"gfx942:sramecc+:xnack-\0", 23)
        return 0

    @_function(c_void_p)
    def hipGetDevice(self, out):
        _put(out, self.current())

    @_function(c_int)
    def hipSetDevice(self, device):
        self.thread.current = device

    @_function(c_void_p)
    def hipThreadExchangeStreamCaptureMode(self, exchanged):
        return self.cuThreadExchangeStreamCaptureMode(exchanged)

    @_function(c_void_p, c_void_p)
    def hipModuleLoadData(self, out, image):
        self.note(f"hipModuleLoadData {self.where()}")
        return self.add_module(out, image)

    @_function(c_void_p, *[c_uint] * 7, c_void_p, c_void_p, c_void_p)
    def hipModuleLaunchKernel(self, function, gx, gy, gz, bx, by, bz, shared, stream, params, extra):
        code, shown = _shown(params, self.modules[function]["sizes"])
        self.note(
            f"hipModuleLaunchKernel name={self.modules[function]['name']} grid={gx},{gy},{gz} block={bx},{by},{bz} "
            f"shared={shared} stream={stream or 0} params={shown} {self.where()}"
        )
        return code

    @_function(c_int, result=c_void_p)
    def hipGetErrorName(self, code):
        return ctypes.addressof(self._texts[code][0])

    @_function(c_int, result=c_void_p)
    def hipGetErrorString(self, code):
        return ctypes.addressof(self._texts[code][1])
