"""Tensor maps: 128 bytes that describe a tensor in memory to the copy engine (TMA) of an NVIDIA GPU from sm_90 on."""

from __future__ import annotations

import ctypes
import functools
from ctypes import addressof, c_uint32, c_uint64

from .driver import cuda_device
from .packer import ALIGNMENT, TENSOR_MAP_BYTES

# (CUtensorMapDataType, bytes of an element). Copies do not interpret what they move, so fp8 travels as u8.
DTYPES = {
    "u8": (0, 1),
    "fp8e4nv": (0, 1),
    "fp8e5": (0, 1),
    "u16": (1, 2),
    "u32": (2, 4),
    "i32": (3, 4),
    "u64": (4, 8),
    "i64": (5, 8),
    "fp16": (6, 2),
    "fp32": (7, 4),
    "fp64": (8, 8),
    "bf16": (9, 2),
}
SWIZZLE_BYTES = {0: 16, 1: 32, 2: 64, 3: 128}
_CACHED = 1024
_MAX_RANK = 5
_MAX_BOX = 256
_MAX_EXTENT = 2**32
_MAX_STRIDE = 2**40
_FAULTY_DRIVER, _FAULTY_BYTES, _FAULTY_BIT = 13010, 128 * 1024, 1 << 21


@functools.lru_cache(maxsize=_CACHED)
def encode(ptr, shape, strides, dtype, box, swizzle=3, device=0, l2_promotion=2, fill_nan=False) -> bytes:
    """The tensor map of the tensor at address `ptr` of GPU `device`: what a "tensormap" parameter is given.

    shape, strides, box: tuples of 1 to 5 ints, the innermost dimension last. strides: in elements, the last one 1.
    dtype: a key of `DTYPES`. box: the part that one copy moves. swizzle: 0 none, 1 32 bytes, 2 64 bytes, 3 128 bytes.
    l2_promotion: 0 none, 1 64 bytes, 2 128 bytes, 3 256 bytes. fill_nan: what lies outside reads as NaN, not as 0.

    A map describes memory, not a tensor, and every argument is in the cache's key: a map found there is right even if
    the memory was freed and given to another tensor since. Raises ValueError naming the rule that is broken,
    DriverError if the driver refuses for another reason.
    """
    if dtype not in DTYPES:
        raise ValueError(f"encode: dtype {dtype!r} has no tensor map: {', '.join(DTYPES)} have")
    which, size = DTYPES[dtype]
    rank = len(shape)
    _check(ptr, shape, strides, size, box, swizzle)
    memory = ctypes.create_string_buffer(TENSOR_MAP_BYTES + ALIGNMENT)
    made = (c_uint64 * (TENSOR_MAP_BYTES // 8)).from_buffer(memory, -addressof(memory) % ALIGNMENT)
    gpu = cuda_device(device)
    arguments = (
        made,
        which,
        rank,
        ptr,
        (c_uint64 * rank)(*reversed(shape)),
        (c_uint64 * rank)(*(stride * size for stride in reversed(strides[:-1]))),
        (c_uint32 * rank)(*reversed(box)),
        (c_uint32 * rank)(*[1] * rank),
        0,
        swizzle,
        l2_promotion,
        int(fill_nan),
    )
    code = gpu.encode_tiled(arguments)
    if code:
        what = f"cannot describe a tensor of shape {shape}, strides {strides}, {dtype}, box {box}, swizzle {swizzle}"
        raise gpu.api.error(code, f"{what}, at {ptr:#x} to the copy engine of {gpu.title}", device=device)
    last_byte = sum((extent - 1) * stride for extent, stride in zip(shape, strides, strict=True)) * size
    if gpu.api.driver_version() <= _FAULTY_DRIVER and last_byte + 1 < _FAULTY_BYTES:
        # These drivers set a bit in the maps of small tensors that makes copies go wrong; CUTLASS clears it too.
        made[1] &= ~_FAULTY_BIT
    return bytes(made)


def _check(ptr, shape, strides, size, box, swizzle) -> None:
    """Raises ValueError for what the driver would call an invalid value without saying which."""
    problem = None
    if not 1 <= len(shape) <= _MAX_RANK or not len(shape) == len(strides) == len(box):
        problem = f"shape {shape}, strides {strides} and box {box} must have the same 1 to {_MAX_RANK} dimensions"
    elif ptr % 16 or not ptr:
        problem = f"the address {ptr:#x} must be a multiple of 16 bytes"
    elif not all(1 <= extent <= _MAX_EXTENT for extent in shape):
        problem = f"shape {shape} must be between 1 and 2**32"
    elif strides[-1] != 1:
        problem = f"the last stride must be 1, got {strides}"
    elif not all(stride * size % 16 == 0 and 0 <= stride * size < _MAX_STRIDE for stride in strides[:-1]):
        problem = f"strides {strides} of {size} bytes must be multiples of 16 bytes below 2**40"
    elif not all(1 <= extent <= _MAX_BOX for extent in box):
        problem = f"box {box} must be between 1 and {_MAX_BOX}"
    elif swizzle not in SWIZZLE_BYTES:
        problem = f"swizzle {swizzle} must be one of {', '.join(map(str, SWIZZLE_BYTES))}"
    elif box[-1] * size % 16 or (swizzle and box[-1] * size > SWIZZLE_BYTES[swizzle]):
        limit = f" of at most {SWIZZLE_BYTES[swizzle]}" if swizzle else ""
        problem = f"the last extent of box {box} is {box[-1] * size} bytes, it must be a multiple of 16 bytes{limit}"
    if problem:
        raise ValueError(f"encode: {problem}")
