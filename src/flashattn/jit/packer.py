"""Packer: the arguments of a launch, laid out in memory as the kernel's parameter list wants them."""

from __future__ import annotations

import ctypes
import functools
import struct
from collections.abc import Iterable

ALIGNMENT = 64  # bytes: what a tensor map by value needs
TENSOR_MAP_BYTES = 128

_CODES = {
    "i1": "?",
    "i8": "b",
    "i16": "h",
    "i32": "i",
    "i64": "q",
    "u1": "?",
    "u8": "B",
    "u16": "H",
    "u32": "I",
    "u64": "Q",
    "fp16": "e",
    "bf16": "H",
    "fp32": "f",
    "fp64": "d",
    "tensormap": f"{TENSOR_MAP_BYTES}s",
}


def bfloat16_bits(value: float) -> int:
    """The 16 bits of `value` rounded to nearest, ties to even, as bfloat16."""
    (bits,) = struct.unpack("<I", struct.pack("<f", value))
    if bits & 0x7FFFFFFF > 0x7F800000:
        return 0x7FC0 | bits >> 16 & 0x8000
    return bits + 0x7FFF + (bits >> 16 & 1) >> 16


PACK_ERRORS = (struct.error, TypeError, ValueError, OverflowError)


def _code(kind: str) -> str:
    return "Q" if kind.startswith("*") else _CODES[kind]


class Packer:
    """One `struct.Struct` that writes a whole launch into one buffer.

    params: (name, type) in the order of the kernel's parameter list. Types: "*..." (a pointer, given as an int), i1 to
        i64, u1 to u64, fp16, bf16, fp32, fp64, "tensormap" (128 bytes by value). Each has its natural alignment.
    head: format of what the launch call itself wants in front of the parameters; its size is a multiple of 64 bytes.
    zeros: names of parameters that are always 0 and for which no argument is given.

    Raises ValueError for a type it does not know.
    """

    def __init__(self, params: Iterable, *, head: str = "", zeros: Iterable[str] = ()):
        zeros = frozenset(zeros)
        params = [(name, kind) for name, kind in params]
        unknown = sorted({kind for _, kind in params if not kind.startswith("*") and kind not in _CODES})
        if unknown:
            raise ValueError(f"parameter types {', '.join(unknown)} are not known: *pointer, {', '.join(_CODES)} are")
        layout, end, offsets = f"<{head}", struct.calcsize(f"<{head}"), []
        for name, kind in params:
            code = _code(kind)
            size = struct.calcsize(f"<{code}")
            start = -(-end // min(size, ALIGNMENT)) * min(size, ALIGNMENT)
            # Pad bytes are written as zeros.
            layout += f"{start - end}x" + (f"{size}x" if name in zeros else code)
            offsets.append(start)
            end = start + size
        self.params = tuple((name, kind) for name, kind in params if name not in zeros)
        self.offsets = tuple(offsets)
        self.size = end
        self._struct = struct.Struct(layout)
        self._maps = tuple(i for i, (_, kind) in enumerate(self.params) if kind == "tensormap")
        self._rounded = tuple(i for i, (_, kind) in enumerate(self.params) if kind == "bf16")

    def slot(self):
        """(pack, buffer, pointers): memory for one launch at a time.

        `pack(*head_values, *args)` fills `buffer` (64-byte aligned); `pointers` holds the parameters' addresses.
        """
        raw = ctypes.create_string_buffer(self.size + ALIGNMENT)
        shift = -ctypes.addressof(raw) % ALIGNMENT
        buffer = (ctypes.c_char * self.size).from_buffer(raw, shift)
        base = ctypes.addressof(buffer)
        pointers = (ctypes.c_void_p * len(self.offsets))(*(base + offset for offset in self.offsets))
        return functools.partial(self._struct.pack_into, buffer, 0), buffer, pointers

    @property
    def converts(self) -> bool:
        """Whether arguments must go through `convert` before they are packed."""
        return bool(self._maps or self._rounded)

    def convert(self, args: tuple) -> tuple:
        """The arguments as `pack` takes them: bfloat16 as bits, tensor maps checked."""
        for i in self._maps:
            # struct would cut a longer value and pad a shorter one without a word.
            if len(args[i]) != TENSOR_MAP_BYTES:
                raise TypeError(f"a tensor map is {TENSOR_MAP_BYTES} bytes")
        if self._rounded:
            values = list(args)
            for i in self._rounded:
                values[i] = bfloat16_bits(values[i])
            return tuple(values)
        return args

    def complaint(self, args: tuple) -> str:
        """Why `args` could not be packed, in a clause that names the parameter."""
        if len(args) != len(self.params):
            names = ", ".join(name for name, _ in self.params)
            return f"{len(args)} arguments were given for {len(self.params)} parameters ({names})"
        for (name, kind), value in zip(self.params, args, strict=True):
            try:
                alone = Packer([(name, kind)])
                alone.slot()[0](*alone.convert((value,)))
            except PACK_ERRORS as error:
                return f"parameter {name} of type {kind} cannot be {value!r} ({error})"
        return "the grid or the stream is not an int"
