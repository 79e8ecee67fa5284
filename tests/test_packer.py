"""What is packed, against the layout rules of C and against what real kernels read."""

from __future__ import annotations

import ctypes
import importlib.util
import re
import struct
from ctypes import addressof, string_at

import pytest
from hypothesis import given
from hypothesis import strategies as st

from flashattn.jit.packer import PACK_ERRORS, Packer, bfloat16_bits

C_TYPES = {
    "i1": ctypes.c_bool,
    "i8": ctypes.c_int8,
    "i16": ctypes.c_int16,
    "i32": ctypes.c_int32,
    "i64": ctypes.c_int64,
    "u1": ctypes.c_bool,
    "u8": ctypes.c_uint8,
    "u16": ctypes.c_uint16,
    "u32": ctypes.c_uint32,
    "u64": ctypes.c_uint64,
    "fp16": ctypes.c_uint16,
    "bf16": ctypes.c_uint16,
    "fp32": ctypes.c_float,
    "fp64": ctypes.c_double,
    "*fp32": ctypes.c_void_p,
}


def packed(params, args, **options) -> bytes:
    packer = Packer(params, **options)
    pack, buffer, _ = packer.slot()
    pack(*packer.convert(args))
    return bytes(buffer)


@given(st.lists(st.sampled_from(sorted(C_TYPES)), max_size=40))
def test_parameters_lie_where_c_puts_them(kinds):
    fields = [(f"p{i}", C_TYPES[kind]) for i, kind in enumerate(kinds)]
    layout = type("Layout", (ctypes.Structure,), {"_fields_": fields})
    packer = Packer([(f"p{i}", kind) for i, kind in enumerate(kinds)])
    assert packer.offsets == tuple(getattr(layout, name).offset for name, _ in fields)
    _, buffer, pointers = packer.slot()
    assert [pointer - addressof(buffer) for pointer in pointers] == list(packer.offsets)


@given(
    st.lists(st.sampled_from(sorted(set(C_TYPES) - {"bf16", "fp16"})), max_size=40), st.randoms(use_true_random=False)
)
def test_values_are_the_bytes_that_c_would_store(kinds, random):
    fields = [(f"p{i}", C_TYPES[kind]) for i, kind in enumerate(kinds)]
    layout = type("Layout", (ctypes.Structure,), {"_fields_": fields})
    args = []
    for _, c_type in fields:
        bits = 8 * ctypes.sizeof(c_type)
        signed = c_type in (ctypes.c_int8, ctypes.c_int16, ctypes.c_int32, ctypes.c_int64)
        whole = random.randrange(-(2 ** (bits - 1)), 2 ** (bits - 1)) if signed else random.randrange(2**bits)
        args.append({ctypes.c_bool: whole % 2, ctypes.c_float: 0.1, ctypes.c_double: 0.1}.get(c_type, whole))
    assert (
        packed([(f"p{i}", kind) for i, kind in enumerate(kinds)], tuple(args)) == bytes(layout(*args))[: _end(layout)]
    )


def _end(layout) -> int:
    """The size of a structure without its last padding."""
    return max((getattr(layout, name).offset + getattr(layout, name).size for name, _ in layout._fields_), default=0)


def test_memory_is_aligned_for_tensor_maps_and_stays_so():
    packer = Packer([("n", "i32"), ("map", "tensormap"), ("m", "i8"), ("other", "tensormap")])
    assert packer.offsets == (0, 64, 192, 256)
    slots = [packer.slot() for _ in range(20)]
    for pack, buffer, pointers in slots:
        assert addressof(buffer) % 64 == 0
        pack(1, b"\x01" * 128, 2, b"\x02" * 128)
        assert string_at(pointers[3], 128) == b"\x02" * 128
    assert len({addressof(buffer) for _, buffer, _ in slots}) == 20


def test_zeros_take_no_argument_and_are_written_every_time():
    params = [("x", "i32"), ("global_scratch", "*u8"), ("y", "i32"), ("profile_scratch", "*u8")]
    packer = Packer(params, zeros=("global_scratch", "profile_scratch"))
    assert packer.params == (("x", "i32"), ("y", "i32"))
    pack, buffer, pointers = packer.slot()
    buffer.raw = b"\xff" * len(buffer)
    pack(1, 2)
    assert len(pointers) == 4
    assert bytes(buffer) == struct.pack("<i4xQi4xQ", 1, 0, 2, 0)


def test_a_head_comes_first_and_takes_the_first_values():
    packer = Packer([("x", "*u8")], head="I60x")
    pack, buffer, pointers = packer.slot()
    pack(7, 9)
    assert pointers[0] - addressof(buffer) == 64
    assert bytes(buffer) == struct.pack("<I60xQ", 7, 9)


def test_an_unknown_type_is_named():
    with pytest.raises(ValueError, match=r"parameter types fp9, i128 are not known: \*pointer, i1, "):
        Packer([("x", "i128"), ("y", "fp9"), ("z", "i32")])


@pytest.mark.parametrize(("kind", "value"), [("fp32", 1e39), ("fp16", 65520.0), ("i1", None), ("tensormap", b"short")])
def test_a_value_out_of_range_is_explained(kind, value):
    packer = Packer([("first", "i32"), ("second", kind)])
    pack, _, _ = packer.slot()
    if kind != "i1":  # which takes the truth of anything
        with pytest.raises(PACK_ERRORS):
            pack(*packer.convert((1, value)))
        assert f"parameter second of type {kind} cannot be {value!r}" in packer.complaint((1, value))
    assert "2 parameters (first, second)" in packer.complaint((1,))


def test_bfloat16_rounds_as_pytorch_does():
    torch = pytest.importorskip("torch", reason="torch says how bfloat16 rounds")
    halfway = [2.0**e * (1 + (2 * i + 1) / 256) for e in (-130, -126, -1, 0, 100) for i in range(8)]
    values = [0.0, -0.0, 1.0, -1.5, 0.1, 3.3895e38, -3.4e38, 1e-45, float("inf"), float("-inf"), *halfway]
    values += torch.randn(1000, dtype=torch.float32, generator=torch.Generator().manual_seed(0)).tolist()
    expected = torch.tensor(values, dtype=torch.float32).to(torch.bfloat16).view(torch.uint16).tolist()
    assert [bfloat16_bits(value) for value in values] == expected
    (last_nan,) = struct.unpack("<f", b"\xff\xff\xff\x7f")
    for nan in (float("nan"), -float("nan"), last_nan, -last_nan):
        assert bfloat16_bits(nan) & 0x7FFF > 0x7F80


# The rest compiles: a kernel's own parameter list is the judge.
needs_triton = pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="Triton is not installed here")


def compiled(kernel: str, signature: dict, **constants):
    """(our parameter list, PTX, cubin) of a kernel of packing_kernels.py for sm_90."""
    import packing_kernels
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    from flashattn.jit.compile import parameters
    from flashattn.jit.spec import KernelSpec

    spec = KernelSpec(
        module="packing_kernels",
        kernel=kernel,
        signature=tuple(signature.items()),
        constants=tuple(constants.items()),
        alignment=(),
        options=(),
        target="sm_90",
    )
    source = ASTSource(getattr(packing_kernels, kernel), signature, constexprs=constants)
    made = triton.compile(source, target=GPUTarget("cuda", 90, 32))
    return list(parameters(spec)), made.asm["ptx"], made.asm["cubin"]


def ptx_parameters(ptx: str) -> list[tuple[int, int]]:
    """(size, alignment) of each parameter of the entry point."""
    found = []
    listed = ptx[ptx.index(".entry") : ptx.index("{", ptx.index(".entry"))]
    for align, bits, count in re.findall(
        r"\.param (?:\.align (\d+) )?\.[bfsu](\d+)[^,\n]*?_param_\d+(?:\[(\d+)\])?", listed
    ):
        size = int(bits) // 8 * int(count or 1)
        found.append((size, int(align or size)))
    return found


def cubin_parameters(cubin: bytes) -> list[tuple[int, int]]:
    """(offset, size) of each parameter: the KPARAM_INFO records of the ELF file."""
    records = {}
    for place in re.finditer(re.escape(b"\x04\x17\x0c\x00"), cubin):
        _, ordinal, offset, packed_size = struct.unpack_from("<IHHI", cubin, place.end())
        records[ordinal] = (offset, packed_size >> 18)
    return [records[i] for i in range(len(records))]


@needs_triton
@pytest.mark.parametrize(
    ("kernel", "signature", "constants"),
    [
        pytest.param(
            "every_kind",
            {
                "x_ptr": "*bf16",
                "small": "i8",
                "strides": ("i64", "i64", "i64"),
                "scale": "fp32",
                "flag": "i1",
                "length": "i32",
                "half": "fp16",
                "wide": "i64",
                "brain": "bf16",
                "y_ptr": "*fp32",
                "BLOCK": "constexpr",
            },
            {"BLOCK": 64},
            id="scalars of every size",
        ),
        pytest.param(
            "described",
            {"desc": "tensordesc<bf16[64, 64]>", "length": "i32", "y_ptr": "*bf16", "BLOCK": "constexpr"},
            {"BLOCK": 64},
            id="a tensor map by value",
        ),
    ],
)
def test_real_kernels_read_what_we_pack(kernel, signature, constants):
    params, ptx, cubin = compiled(kernel, signature, **constants)
    packer = Packer(params)
    sizes = [Packer([param]).size for param in params]
    read = cubin_parameters(cubin)
    # The first parameter is moved to where its alignment wants it in the constant bank, and the others with it.
    assert [(offset - read[0][0], size) for offset, size in read] == list(zip(packer.offsets, sizes, strict=True))
    alignments = [min(size, 64) for size in sizes]
    assert ptx_parameters(ptx) == list(zip(sizes, alignments, strict=True))
