"""The driver on a real NVIDIA GPU: what the stand-ins cannot prove."""

from __future__ import annotations

import importlib.util
import os
import threading

import pytest

from flashattn.jit import driver, tensormap
from flashattn.jit.driver import DriverError
from flashattn.jit.spec import KernelSpec

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="Triton is not installed here"),
]

KINDS = {
    "every_kind": {
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
    "described": {"desc": "tensordesc<bf16[64, 64]>", "length": "i32", "y_ptr": "*bf16", "BLOCK": "constexpr"},
}


def compiled(kernel: str, device: int = 0, **options):
    from flashattn.jit.compile import compile_spec

    spec = KernelSpec(
        module="packing_kernels",
        kernel=kernel,
        signature=tuple(KINDS[kernel].items()),
        constants=(("BLOCK", 64),),
        alignment=(),
        options=tuple(options.items()),
        target=driver.device_info(device).target,
    )
    return compile_spec(spec, source_digest="0" * 64)


@pytest.fixture
def torch():
    return pytest.importorskip("torch")


def problem(torch, device: int = 0):
    """(arguments of every_kind, its output, what that must be), for 50 of 64 elements."""
    x = torch.randn(200, device=f"cuda:{device}", dtype=torch.bfloat16)
    y = torch.full((64,), float("nan"), device=x.device)
    args = (x.data_ptr(), -3, 3, 2, 1, 0.25, True, 50, 1.5, 2**20, -2.0, y.data_ptr())
    expected = torch.zeros(64, device=x.device)
    expected[:50] = x[2:152:3].float() * 0.25 + 1.5 - 2.0 - 3 + 2**20
    expected[50:] = 1.5 - 2.0 - 3 + 2**20
    return args, y, expected, x


def stream(torch, device: int = 0) -> int:
    return torch.cuda.current_stream(device).cuda_stream


def test_a_kernel_reads_every_argument_as_it_was_given(torch):
    args, y, expected, _x = problem(torch)
    kernel = driver.load(compiled("every_kind"), 0)
    kernel.launch(1, stream(torch), args)
    # A masked load gives an undefined value where it is not replaced.
    torch.testing.assert_close(y[:50], expected[:50], rtol=0, atol=0.5)
    kernel.launch(1, stream(torch), (*args[:6], False, *args[7:]))
    assert y[:50].abs().max().item() == 0


def test_a_tensor_map_travels_by_value(torch):
    made = compiled("described")
    if not made.meta["tensor_maps"]:
        pytest.skip(f"{made.meta['target']} has no copy engine")
    x = torch.randn(200, 64, device="cuda", dtype=torch.bfloat16)
    y = torch.empty(64, 64, device="cuda", dtype=torch.bfloat16)
    wanted = made.meta["tensor_maps"][0]
    box, swizzle = tuple(wanted["block_size"]), wanted["swizzle"]
    described = tensormap.encode(x.data_ptr(), tuple(x.shape), x.stride(), "bf16", box, swizzle)
    kernel = driver.load(made, 0)
    # Rows 150 to 213: what lies outside reads as 0.
    kernel.launch(1, stream(torch), (described, 200, 64, 64, 1, 150, y.data_ptr()))
    assert torch.equal(y[:50], x[150:])
    assert y[50:].abs().max().item() == 0


def test_a_kernel_can_be_loaded_while_a_graph_is_captured(torch):
    args, y, _expected, _x = problem(torch)
    made = compiled("every_kind", num_warps=2)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        driver.load(made, 0).launch(1, stream(torch), args)
    assert y.isnan().all()
    graph.replay()
    assert not y[:50].isnan().any()


def test_a_fresh_thread_can_load_and_launch(torch):
    args, y, _expected, _x = problem(torch)
    made, here = compiled("every_kind", num_warps=1), stream(torch)
    raised = []

    def work():
        try:
            driver.load(made, 0).launch(1, here, args)
        except BaseException as error:
            raised.append(error)

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert raised == []
    assert not y[:50].isnan().any()


def test_two_devices_are_kept_apart(torch):
    if torch.cuda.device_count() < 2:
        pytest.skip("this machine has one GPU")
    kernels = [driver.load(compiled("every_kind", device), device) for device in (0, 1)]
    assert torch.cuda.current_device() == 0
    for device in (1, 0, 1):
        args, y, _expected, _x = problem(torch, device)
        with torch.cuda.device(device):
            kernels[device].launch(1, stream(torch, device), args)
        assert not y[:50].isnan().any()


def test_a_forked_child_is_told_what_to_do(torch):
    args, _y, _expected, _x = problem(torch)
    made, here = compiled("every_kind"), stream(torch)
    kernel = driver.load(made, 0)
    answers = []
    for work in (lambda: driver.load(made, 0), lambda: kernel.launch(1, here, args)):
        reading, writing = os.pipe()
        child = os.fork()
        if child == 0:
            try:
                work()
                os.write(writing, b"nothing was raised")
            except BaseException as error:
                os.write(writing, f"{type(error).__name__}: {error}".encode())
            os._exit(0)
        os.close(writing)
        with os.fdopen(reading, "rb") as pipe:
            answers.append(pipe.read().decode())
        os.waitpid(child, 0)
    assert all(answer.startswith("DriverError: ") for answer in answers), answers
    assert "forked" in answers[0], answers


def test_code_that_is_none_is_refused_and_leaves_the_gpu_usable(torch):
    from dataclasses import replace

    made = compiled("every_kind")
    broken = replace(made, code=b"\x7fELF" + bytes(200), meta={**made.meta, "code_sha256": "0" * 64})
    with pytest.raises(DriverError, match=r"cannot load every_kind\["):
        driver.load(broken, 0)
    args, y, _expected, _x = problem(torch)
    driver.load(made, 0).launch(1, stream(torch), args)
    assert not y[:50].isnan().any()
