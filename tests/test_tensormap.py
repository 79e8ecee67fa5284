"""Tensor maps, as the driver's stand-in is asked for them."""

from __future__ import annotations

import struct
import threading

import pytest
from fake_driver_python import CudaStandIn

from flashattn.jit import driver, tensormap
from flashattn.jit.driver import DriverError

SMALL = (0x10000, (128, 64), (64, 1), "bf16", (64, 64))
FAULTY_BIT = 1 << 21


@pytest.fixture
def cuda():
    stand_in = CudaStandIn()
    driver.use_library(stand_in.library)
    tensormap.encode.cache_clear()
    stand_in.make_current(0)
    yield stand_in
    driver.use_library(None)
    tensormap.encode.cache_clear()


@pytest.fixture
def asked(cuda):
    """What the driver was asked for: (dtype, rank, address, shape, strides, box, steps, options)."""
    seen = []
    plain = cuda.cuTensorMapEncodeTiled

    def record(made, dtype, rank, address, shape, strides, box, steps, *options):
        longs, ints = tensormap.c_uint64, tensormap.c_uint32
        seen.append(
            (
                dtype,
                rank,
                address,
                list((longs * rank).from_address(shape)),
                list((longs * (rank - 1)).from_address(strides)),
                list((ints * rank).from_address(box)),
                list((ints * rank).from_address(steps)),
                options,
            )
        )
        return plain(made, dtype, rank, address, shape, strides, box, steps, *options)

    record.types, record.result = plain.types, plain.result
    cuda.cuTensorMapEncodeTiled = record
    driver.use_library(cuda._functions())
    return seen


def test_dimensions_are_reversed_and_strides_are_in_bytes(asked):
    described = tensormap.encode(0x20000, (8, 1000, 128), (128000, 128, 1), "bf16", (1, 128, 64), swizzle=3)
    assert len(described) == 128
    assert asked == [(9, 3, 0x20000, [128, 1000, 8], [256, 256000], [64, 128, 1], [1, 1, 1], (0, 3, 2, 0))]


def test_one_dimension_has_no_strides(asked):
    tensormap.encode(0x20000, (4096,), (1,), "fp32", (32,), swizzle=0, l2_promotion=3, fill_nan=True)
    assert asked == [(7, 1, 0x20000, [4096], [], [32], [1], (0, 0, 3, 1))]


@pytest.mark.parametrize(("dtype", "number"), [("u8", 0), ("fp16", 6), ("fp32", 7), ("bf16", 9), ("fp8e4nv", 0)])
def test_dtypes_have_the_numbers_of_the_driver(asked, dtype, number):
    tensormap.encode(0x20000, (64, 64), (64, 1), dtype, (64, 16), swizzle=3)
    assert asked[0][0] == number


def test_a_map_is_encoded_once(cuda):
    assert tensormap.encode(*SMALL) is tensormap.encode(*SMALL)
    assert len(cuda.calls("cuTensorMapEncodeTiled")) == 1


@pytest.mark.parametrize(
    "other",
    [
        (0x10010, (128, 64), (64, 1), "bf16", (64, 64)),
        (0x10000, (127, 64), (64, 1), "bf16", (64, 64)),
        (0x10000, (128, 64), (72, 1), "bf16", (64, 64)),
        (0x10000, (128, 64), (64, 1), "fp16", (64, 64)),
        (0x10000, (128, 64), (64, 1), "bf16", (32, 64)),
        (0x10000, (128, 64), (64, 1), "bf16", (64, 64), 3, 1),
        (0x10000, (128, 64), (64, 1), "bf16", (64, 64), 3, 0, 1),
        (0x10000, (128, 64), (64, 1), "bf16", (64, 64), 3, 0, 2, True),
        (0x10000, (128, 64), (64, 1), "bf16", (64, 32), 2),
    ],
    ids=["address", "shape", "strides", "dtype", "box", "device", "promotion", "fill", "swizzle"],
)
def test_memory_that_is_used_anew_gets_a_map_of_its_own(cuda, other):
    tensormap.encode(*SMALL)
    tensormap.encode(*other)
    assert len(cuda.calls("cuTensorMapEncodeTiled")) == 2


def test_the_cache_does_not_grow_for_ever(cuda):
    for i in range(tensormap.encode.cache_info().maxsize + 10):
        tensormap.encode(0x10000 + 16 * i, *SMALL[1:])
    info = tensormap.encode.cache_info()
    assert info.currsize == info.maxsize


@pytest.mark.parametrize(("version", "cleared"), [(12090, True), (13010, True), (13020, False)])
def test_drivers_that_spoil_the_maps_of_small_tensors_are_corrected(cuda, version, cleared):
    cuda.set("version", version)
    (word,) = struct.unpack_from("<Q", tensormap.encode(*SMALL), 8)
    assert word == (2**64 - 1) & ~(FAULTY_BIT if cleared else 0)


@pytest.mark.parametrize(("rows", "cleared"), [(1024, True), (1025, False)])
def test_the_maps_of_large_tensors_are_left_alone(cuda, rows, cleared):
    cuda.set("version", 13000)
    (word,) = struct.unpack_from("<Q", tensormap.encode(0x10000, (rows, 64), (64, 1), "bf16", (64, 64)), 8)
    assert bool(word & FAULTY_BIT) is not cleared


def test_a_fresh_thread_can_encode(cuda):
    made = []
    thread = threading.Thread(target=lambda: made.append(tensormap.encode(*SMALL, device=1)))
    thread.start()
    thread.join()
    assert len(made[0]) == 128
    assert [call.device for call in cuda.calls("cuTensorMapEncodeTiled")] == [-1, 1]


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        ((0x10008, *SMALL[1:]), "address 0x10008 must be a multiple of 16"),
        ((0, *SMALL[1:]), "address 0x0 must be"),
        ((0x10000, (128, 0), (64, 1), "bf16", (64, 64)), r"shape \(128, 0\) must be between 1 and"),
        ((0x10000, (128, 64), (1, 128), "bf16", (64, 64)), r"last stride must be 1, got \(1, 128\)"),
        ((0x10000, (128, 64), (66, 1), "bf16", (64, 64)), r"strides \(66, 1\) of 2 bytes must be multiples of 16"),
        ((0x10000, (512, 64), (64, 1), "bf16", (257, 64)), r"box \(257, 64\) must be between 1 and 256"),
        (
            (0x10000, (128, 128), (128, 1), "bf16", (64, 128)),
            "256 bytes, it must be a multiple of 16 bytes of at most 128",
        ),
        ((0x10000, (128, 128), (128, 1), "bf16", (64, 4), 0), "8 bytes, it must be a multiple of 16 bytes$"),
        ((0x10000, (128, 64), (64, 1), "bf16", (64,)), "must have the same 1 to 5 dimensions"),
        ((0x10000, (128, 64), (64, 1), "fp4", (64, 64)), "dtype 'fp4' has no tensor map: u8, "),
        ((0x10000, (128, 64), (64, 1), "bf16", (64, 64), 9), "swizzle 9 must be one of 0, 1, 2, 3"),
    ],
)
def test_a_broken_rule_is_named(cuda, arguments, text):
    with pytest.raises(ValueError, match=f"encode: .*{text}"):
        tensormap.encode(*arguments)
    assert cuda.calls("cuTensorMapEncodeTiled") == []


def test_a_refusal_of_the_driver_describes_the_tensor(cuda):
    cuda.fail("cuTensorMapEncodeTiled", 1)
    with pytest.raises(
        DriverError, match=r"shape \(128, 64\), .*bf16.* 0x10000 .*Stand-in 0.*CUDA_ERROR_INVALID_VALUE"
    ):
        tensormap.encode(*SMALL)
    assert len(tensormap.encode(*SMALL)) == 128


def test_a_driver_without_tensor_maps_says_so(cuda):
    library = cuda._functions()
    del library.cuTensorMapEncodeTiled
    driver.use_library(library)
    with pytest.raises(DriverError, match="too old for tensor maps"):
        tensormap.encode(*SMALL)
