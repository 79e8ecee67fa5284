"""Loading and launching, against stand-ins for the driver."""

from __future__ import annotations

import struct
import sys
import threading

import pytest
from fake_driver import artifact
from fake_driver_fixtures import cuda_fixture, loaded
from fake_driver_python import CudaStandIn

from flashattn.jit import driver
from flashattn.jit.driver import DriverError

cuda = cuda_fixture


def on_thread(work):
    """`work()` on a fresh thread: its result, or what it raised."""
    box = []

    def run():
        try:
            box.append(work())
        except BaseException as error:
            box.append(error)

    thread = threading.Thread(target=run)
    thread.start()
    thread.join()
    return box[0]


class TestLaunch:
    def test_passes_every_parameter_the_shape_and_the_stream(self, cuda):
        params = (("x_ptr", "*bf16"), ("scale", "fp32"), ("strides.0", "i64"), ("flag", "i1"), ("n", "i32"))
        kernel = loaded(cuda, params=params, num_warps=8, shared=1024)
        args = (0xFFFF_8000_0000_0010, 0.5, -3, True, -7)
        kernel.launch(2**31 - 1, 0xABCDEF012345, args)
        (call,) = cuda.launches()
        assert call.name == "probe"
        assert (call.grid, call.block, call.shared) == ((2**31 - 1, 1, 1), (256, 1, 1), 1024)
        assert (call.stream, call.attributes, call.device) == (0xABCDEF012345, {}, 0)
        expected = [struct.pack(f"<{code}", v) for code, v in zip("Qfq?i", args, strict=True)]
        assert call.params == [*expected, bytes(8), bytes(8)]

    def test_a_second_launch_does_not_see_the_first(self, cuda):
        kernel = loaded(cuda)
        kernel.launch(1, 5, (16, 3))
        kernel.launch(2, 6, (32, 4))
        assert [(c.grid[0], c.stream, c.params[0][0], c.params[1][0]) for c in cuda.launches()] == [
            (1, 5, 16, 3),
            (2, 6, 32, 4),
        ]

    def test_a_grid_of_zero_does_nothing(self, cuda):
        loaded(cuda).launch(0, 0, (16, 3))
        assert cuda.launches() == []

    @pytest.mark.parametrize("grid", [-1, 2**31])
    def test_a_grid_out_of_range_raises(self, cuda, grid):
        with pytest.raises(ValueError, match=rf"probe\[sm_90 .*0 to 2147483647 programs, got {grid}"):
            loaded(cuda).launch(grid, 0, (16, 3))
        assert cuda.launches() == []

    @pytest.mark.parametrize(
        ("args", "text"),
        [
            ((16,), r"1 arguments were given for 2 parameters \(x_ptr, n\)"),
            ((16, 3, 4), "3 arguments were given for 2 parameters"),
            ((16, 2**31), "parameter n of type i32 cannot be 2147483648"),
            ((-1, 3), r"parameter x_ptr of type \*bf16 cannot be -1"),
            ((None, 3), r"parameter x_ptr of type \*bf16 cannot be None"),
            ((16, 3.0), "parameter n of type i32 cannot be 3.0"),
        ],
    )
    def test_a_wrong_argument_is_named(self, cuda, args, text):
        with pytest.raises(TypeError, match=rf"probe\[sm_90 .*{text}"):
            loaded(cuda).launch(1, 0, args)
        assert cuda.launches() == []

    @pytest.mark.parametrize(("grid", "stream"), [(1.0, 0), (1, "0"), (1, None), (1, -1)])
    def test_a_wrong_grid_or_stream_is_named(self, cuda, grid, stream):
        with pytest.raises(TypeError, match="the grid or the stream is not an int"):
            loaded(cuda).launch(grid, stream, (16, 3))

    def test_a_wrong_argument_leaves_the_kernel_usable(self, cuda):
        kernel = loaded(cuda)
        with pytest.raises(TypeError):
            kernel.launch(1, 0, (None, 3))
        kernel.launch(1, 0, (16, 3))
        assert len(cuda.launches()) == 1

    def test_scalars_of_two_bytes_and_tensor_maps_travel_by_value(self, cuda):
        params = (("scale", "bf16"), ("desc.map", "tensormap"), ("half", "fp16"))
        kernel = loaded(cuda, params=params)
        described = bytes(range(128))
        kernel.launch(1, 0, (1.5, described, -2.0))
        assert cuda.launches()[0].params[:3] == [b"\xc0\x3f", described, struct.pack("<e", -2.0)]
        with pytest.raises(TypeError, match=r"parameter desc.map of type tensormap cannot be .* is 128 bytes"):
            kernel.launch(1, 0, (1.5, described[:127], -2.0))
        with pytest.raises(TypeError, match="2 arguments were given for 3"):
            kernel.launch(1, 0, (1.5, described))

    def test_clusters_multiply_the_grid_and_travel_as_attributes(self, cuda):
        kernel = loaded(cuda, num_ctas=2, cluster=[2, 1, 1], pdl=True, cooperative=True)
        kernel.launch(3, 0, (16, 3))
        (call,) = cuda.launches()
        assert call.grid == (6, 1, 1)
        assert call.attributes == {6: (1, 0, 0), 2: (1, 0, 0), 4: (2, 1, 1), 5: (1, 0, 0)}
        with pytest.raises(ValueError, match="0 to 1073741823 programs"):
            kernel.launch(2**30, 0, (16, 3))

    def test_a_cluster_of_16_is_asked_for_when_loading(self, cuda):
        loaded(cuda, num_ctas=16, cluster=[16, 1, 1])
        assert [(call.which, call.value) for call in cuda.calls("cuFuncSetAttribute")] == [(14, 1)]

    def test_scratch_is_a_parameter_of_the_kernels_that_need_it(self, cuda):
        kernel = loaded(cuda, global_scratch=[512, 128], num_ctas=2, cluster=[2, 1, 1])
        assert (kernel.scratch_bytes(3), kernel.scratch_alignment) == (3 * 2 * 512, 128)
        kernel.launch(3, 0, (16, 3), scratch=0x1280)
        assert cuda.launches()[0].params[2:] == [struct.pack("<Q", 0x1280), bytes(8)]
        kernel.launch(0, 0, (16, 3))
        for wrong in (0, 0x1240):
            with pytest.raises(ValueError, match=rf"scratch must be the address of 3072 bytes .* 128; got {wrong}"):
                kernel.launch(3, 0, (16, 3), scratch=wrong)
        assert len(cuda.launches()) == 1

    def test_scratch_is_not_needed_by_the_others(self, cuda):
        kernel = loaded(cuda)
        assert kernel.scratch_bytes(1000) == 0
        kernel.launch(1, 0, (16, 3), scratch=0x1280)
        assert cuda.launches()[0].params[2:] == [bytes(8), bytes(8)]

    def test_threads_never_mix_their_parameters(self, cuda):
        count, rounds = 8, 200
        kernel = loaded(cuda, params=(("x_ptr", "*bf16"), *((f"n{i}", "i64") for i in range(20))))
        start = threading.Barrier(count)

        def work(number):
            cuda.make_current(0)
            start.wait()
            for i in range(rounds):
                kernel.launch(1 + number, number, (number * 1000 + i, *[number] * 20))

        threads = [threading.Thread(target=work, args=(number,)) for number in range(count)]
        before = sys.getswitchinterval()
        sys.setswitchinterval(1e-6)
        try:
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join()
        finally:
            sys.setswitchinterval(before)
        seen = set()
        for call in cuda.launches():
            number = call.stream
            assert call.grid[0] == 1 + number
            assert {int.from_bytes(p, "little") for p in call.params[1:21]} == {number}
            seen.add(int.from_bytes(call.params[0], "little"))
        assert seen == {number * 1000 + i for number in range(count) for i in range(rounds)}


class TestContext:
    def test_a_fresh_thread_gets_the_context_of_the_kernel(self, cuda):
        kernel = loaded(cuda, device=1)

        def work():
            kernel.launch(1, 0, (16, 3))
            kernel.launch(1, 0, (16, 3))
            return cuda.current()

        assert on_thread(work) == 1
        assert [call.device for call in cuda.launches()] == [1, 1]

    def test_a_context_that_was_current_is_current_afterwards(self, cuda):
        kernel = loaded(cuda, device=1)
        cuda.make_current(0)
        cuda.fail("cuLaunchKernelEx", 201)
        kernel.launch(1, 0, (16, 3))
        assert [call.device for call in cuda.launches()] == [1]
        assert cuda.current() == 0

    def test_a_launch_is_tried_again_once_only(self, cuda):
        kernel = loaded(cuda)
        cuda.fail("cuLaunchKernelEx", 201, 2)
        with pytest.raises(DriverError, match="CUDA_ERROR_INVALID_CONTEXT") as caught:
            kernel.launch(1, 0, (16, 3))
        assert caught.value.code == 201
        kernel.launch(1, 0, (16, 3))

    def test_a_launch_on_the_wrong_device_says_so(self, cuda):
        kernel = loaded(cuda, device=1)
        cuda.make_current(0)
        with pytest.raises(DriverError, match=r"on cuda:1 .*CUDA_ERROR_INVALID_HANDLE.*torch.cuda.device"):
            kernel.launch(1, 0, (16, 3))

    @pytest.mark.parametrize("current", [-1, 0, 1])
    def test_loading_for_another_device_leaves_the_current_one(self, cuda, current):
        cuda.make_current(current)
        driver.load(artifact(), 1)
        assert cuda.current() == current
        assert [call.device for call in cuda.calls("cuModuleLoadData")] == [1]

    def test_a_failed_load_leaves_the_current_device_too(self, cuda):
        cuda.make_current(0)
        cuda.fail("cuModuleLoadData", 2)
        with pytest.raises(DriverError):
            driver.load(artifact(), 1)
        assert cuda.current() == 0

    def test_devices_are_loaded_and_launched_apart(self, cuda):
        made = artifact()
        kernels = [driver.load(made, device) for device in (0, 1)]
        for device in (0, 1, 0):
            cuda.make_current(device)
            kernels[device].launch(1, 0, (device, 3))
        assert [(call.device, call.params[0][0]) for call in cuda.launches()] == [(0, 0), (1, 1), (0, 0)]
        assert [call.device for call in cuda.calls("cuModuleLoadData")] == [0, 1]


class TestLoad:
    def test_a_kernel_is_loaded_once_a_device(self, cuda):
        assert driver.load(artifact(), 0) is driver.load(artifact(), 0)
        assert driver.load(artifact(), 0) is not driver.load(artifact(), 1)
        assert len(cuda.calls("cuModuleLoadData")) == 2
        assert len(cuda.calls("cuDevicePrimaryCtxRetain")) == 2

    def test_other_code_is_another_kernel(self, cuda):
        first = driver.load(artifact(), 0)
        assert driver.load(artifact(code_sha256="1" * 64, artifact_key=artifact().key), 0) is not first

    def test_threads_load_a_kernel_once(self, cuda):
        count = 16
        start = threading.Barrier(count)

        def work():
            start.wait()
            kernels.append(driver.load(artifact(), 0))

        kernels, threads = [], [threading.Thread(target=work) for _ in range(count)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert len(set(map(id, kernels))) == 1
        assert len(kernels) == count
        assert len(cuda.calls("cuModuleLoadData")) == 1

    @pytest.mark.parametrize(("shared", "asked"), [(48 * 1024, []), (48 * 1024 + 1, [(8, 48 * 1024 + 1)])])
    def test_more_than_48_kib_of_shared_memory_is_asked_for(self, cuda, shared, asked):
        kernel = loaded(cuda, shared=shared)
        assert [(call.which, call.value) for call in cuda.calls("cuFuncSetAttribute")] == asked
        kernel.launch(1, 0, (16, 3))
        assert cuda.launches()[0].shared == shared

    def test_more_shared_memory_than_the_device_has_is_refused(self, cuda):
        cuda.set("shared_limit", 101376)
        with pytest.raises(
            DriverError, match=r"probe\[sm_90 .*wants 101377 bytes .* device allows 101376; smaller tiles"
        ):
            driver.load(artifact(shared=101377), 0)
        assert cuda.calls("cuModuleLoadData") == []

    def test_another_target_is_refused(self, cuda):
        cuda.set("capability", 120, index=1)
        driver.load(artifact(), 0)
        with pytest.raises(DriverError, match=r"on cuda:1 \(Stand-in 1\): it was compiled for sm_90, .* is sm_120"):
            driver.load(artifact(), 1)

    def test_a_profiled_kernel_is_refused(self, cuda):
        with pytest.raises(DriverError, match="compiled with profiling"):
            driver.load(artifact(profile_scratch=[64, 16]), 0)

    def test_a_missing_function_is_named(self, cuda):
        with pytest.raises(DriverError, match=r"its function 'missing'\): CUDA_ERROR_NOT_FOUND \(500\)"):
            driver.load(artifact(kernel="missing"), 0)

    def test_a_failed_load_can_be_tried_again(self, cuda):
        cuda.fail("cuModuleLoadData", 2)
        with pytest.raises(DriverError, match="CUDA_ERROR_OUT_OF_MEMORY"):
            driver.load(artifact(), 0)
        loaded(cuda).launch(1, 0, (16, 3))
        assert len(cuda.launches()) == 1

    def test_loading_is_allowed_while_a_graph_is_captured(self, cuda):
        cuda.set("capturing", 1)
        loaded(cuda)
        assert [call.mode for call in cuda.calls("cuModuleLoadData")] == [2]
        assert [call.mode for call in cuda.calls("cuFuncLoad")] == [2]
        assert [call.mode for call in cuda.calls("cuThreadExchangeStreamCaptureMode")] == [2, 0]

    def test_the_capture_mode_comes_back_after_a_failed_load(self, cuda):
        cuda.fail("cuModuleGetFunction", 500)
        with pytest.raises(DriverError):
            driver.load(artifact(), 0)
        assert [call.mode for call in cuda.calls("cuThreadExchangeStreamCaptureMode")] == [2, 0]

    def test_a_driver_without_the_latest_functions_is_enough(self):
        stand_in = CudaStandIn()
        del stand_in.library.cuFuncLoad
        driver.use_library(stand_in.library)
        try:
            loaded(stand_in).launch(1, 0, (16, 3))
        finally:
            driver.use_library(None)
        assert len(stand_in.launches()) == 1
