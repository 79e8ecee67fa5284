"""What the Hopper forward is launched with: tensor maps, tile counters, sections; on a stand-in for the driver."""

from __future__ import annotations

import pytest
import torch
from fake_driver_python import CudaStandIn

from flashattn import hopper, hopper_boxes, specs
from flashattn.jit import driver, tensormap
from flashattn.jit.compile import parameters
from flashattn.jit.driver_error import DriverError
from flashattn.jit.packer import Packer
from flashattn.variants import FwdVariant


@pytest.fixture
def cuda(monkeypatch):
    """A stand-in GPU whose current stream is 7, and torch's way to it."""
    stand_in = CudaStandIn()
    driver.use_library(stand_in.library)
    tensormap.encode.cache_clear()
    stand_in.make_current(0)
    stand_in.stream, stand_in.capturing = 7, False
    empty = torch.empty
    monkeypatch.setattr(hopper, "_counters", {})
    monkeypatch.setattr(hopper, "multiprocessors", lambda index: 132)
    monkeypatch.setattr(torch, "empty", lambda *size, dtype, device: empty(*size, dtype=dtype))
    monkeypatch.setattr(torch._C, "_cuda_getCurrentRawStream", lambda index: stand_in.stream, raising=False)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: stand_in.capturing)
    yield stand_in
    driver.use_library(None)
    tensormap.encode.cache_clear()


def spec_of(head_dim: int, head_dim_v: int, mask: str = "causal", dtype: str = "bf16"):
    facts = {"dtype": dtype, "head_dim": head_dim, "head_dim_v": head_dim_v, "mask": mask, "is_aligned": True}
    (spec,) = specs.specs_of(FwdVariant(**facts, allow_tf32=False, has_tables=False), "sm_90")
    assert spec.kernel == "hopper_attn_fwd"
    return spec


def prepared(spec, batch=2, seqlen_q=300, seqlen_k=500, heads_q=6, heads_k=2):
    constants = dict(spec.constants)
    d, dv = constants["HEAD_DIM"], constants["HEAD_DIM_V"]
    shapes = ((seqlen_q, heads_q, d), (seqlen_k, heads_k, d), (seqlen_k, heads_k, dv), (seqlen_q, heads_q, dv))
    tensors = [torch.empty((batch, *shape), dtype=torch.bfloat16, device="cpu") for shape in shapes]
    return hopper.prepare(constants, 0, tuple(tensors), "bf16", 200, 0.5, True)


@pytest.mark.parametrize(
    ("head_dim", "head_dim_v"), [(64, 64), (96, 96), (128, 128), (192, 192), (256, 256), (192, 128)]
)
@pytest.mark.parametrize("mask", ["full", "causal"])
def test_the_arguments_are_the_kernels_parameters(cuda, head_dim, head_dim_v, mask):
    spec = spec_of(head_dim, head_dim_v, mask)
    grid, arguments = prepared(spec)
    values = arguments(0x10000, 0x20000, 0x30000, 0x40000, 0x50000)
    packer = Packer(list(parameters(spec)), zeros=("global_scratch", "profile_scratch"))
    packer.slot()[0](*packer.convert(values))
    by_name = dict(zip((name for name, _ in packer.params), values, strict=True))
    assert (by_name["lse_ptr"], by_name["diagonal"], by_name["softmax_scale"]) == (0x50000, 200, 0.5)
    assert (by_name["seqlen_q"], by_name["seqlen_k"], by_name["heads_q"], by_name["heads_k"]) == (300, 500, 6, 2)
    assert [by_name[f"k_descs.0.shape.{i}"] for i in range(4)] == [2, 500, 2, head_dim]
    assert grid == min(132, 2 * 6 * -(-300 // dict(spec.constants)["BLOCK_M"]))


def test_a_box_covers_a_tile_and_fits_the_copy_engine():
    for spec in (spec_of(64, 64), spec_of(96, 96), spec_of(256, 256), spec_of(192, 128)):
        c = dict(spec.constants)
        for tiles in hopper_boxes.tiles_of(c["HEAD_DIM"], c["HEAD_DIM_V"], c["BLOCK_N"], c["O_WIDTH"]).values():
            for rows, columns in tiles:
                (_, box_rows, _, box_columns), swizzle = hopper_boxes.box_of(rows, columns)
                assert box_rows == rows <= 256 and columns % box_columns == 0
                assert 2 * box_columns == tensormap.SWIZZLE_BYTES[swizzle]


def test_maps_are_encoded_once_an_address(cuda):
    _, arguments = prepared(spec_of(128, 128))
    first = arguments(0x10000, 0x20000, 0x30000, 0x40000, 0)
    asked = len(cuda.calls("cuTensorMapEncodeTiled"))
    assert arguments(0x10000, 0x20000, 0x30000, 0x40000, 0) == first
    assert len(cuda.calls("cuTensorMapEncodeTiled")) == asked == 4
    assert arguments(0x10000, 0x20000, 0x30000, 0x90000, 0) != first
    assert len(cuda.calls("cuTensorMapEncodeTiled")) == 5


def test_what_is_kept_of_addresses_does_not_grow_for_ever(cuda):
    _, arguments = prepared(spec_of(64, 64))
    for i in range(1, 1000):
        arguments(0x10000, 0x20000, 0x30000, 0x1000 * i, 0)
    (maps,) = {cell.cell_contents for cell in arguments.__closure__ if isinstance(cell.cell_contents, hopper._Maps)} & {
        arguments.__closure__[arguments.__code__.co_freevars.index("of_out")].cell_contents
    }
    assert len(maps.made) <= hopper._MOST_MAPS


def test_launches_on_one_stream_share_a_counter_and_others_do_not(cuda):
    first = hopper.counter(0)
    assert hopper.counter(0) == first
    cuda.stream = 8
    assert hopper.counter(0) != first
    cuda.stream = 7
    assert hopper.counter(0) == first
    made = [
        (call.fields["value"], call.fields["words"], call.fields["stream"]) for call in cuda.calls("cuMemsetD32Async")
    ]
    assert made == [("0", "1", "7"), ("0", "1", "8")]


def test_a_captured_launch_has_a_counter_that_its_graph_zeroes(cuda):
    shared = hopper.counter(0)
    cuda.capturing = True
    hopper.counter(0)
    hopper.counter(0)
    cuda.capturing = False
    assert hopper.counter(0) == shared
    assert len(cuda.calls("cuMemsetD32Async")) == 3


def test_a_driver_that_cannot_zero_a_counter_is_told(cuda):
    cuda.fail("cuMemsetD32Async", 1)
    with pytest.raises(DriverError, match=r"cannot set 4 bytes of cuda:0 .* to zero"):
        hopper.counter(0)
    assert hopper._counters == {}


def test_sections_hold_as_many_heads_as_fit_the_l2():
    assert hopper.section(16384, 512, is_causal=False) == 1
    assert hopper.section(16384, 512, is_causal=True) == 4
    assert hopper.section(1 << 24, 512, is_causal=True) == 1
    assert hopper.section(1, 2, is_causal=True) == 64
