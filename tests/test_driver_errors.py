"""What is said when a driver refuses, or is not there."""

from __future__ import annotations

import pickle

import pytest
from fake_driver import artifact
from fake_driver_fixtures import cuda_fixture, loaded
from fake_driver_python import ERRORS, CudaStandIn

from flashattn.jit import driver
from flashattn.jit.driver import DriverError

cuda = cuda_fixture


class TestErrors:
    @pytest.mark.parametrize(
        ("code", "advice"),
        [
            (2, "out of memory: free some"),
            (200, "flashattn verify"),
            (209, "built for another GPU"),
            (218, "newer driver is needed"),
            (222, "newer than the driver"),
            (400, "belongs to another device"),
            (700, "CUDA_LAUNCH_BLOCKING=1"),
            (701, "more registers, threads or shared memory"),
            (716, "not aligned"),
            (719, "CUDA_LAUNCH_BLOCKING=1"),
            (900, "call the function once before the capture"),
            (901, "start it again"),
        ],
    )
    @pytest.mark.parametrize("function", ["cuLaunchKernelEx", "cuModuleLoadData"])
    def test_an_error_names_the_kernel_the_device_and_what_to_do(self, cuda, function, code, advice):
        name, text = ERRORS[code]
        if function == "cuModuleLoadData":
            cuda.fail(function, code)
            with pytest.raises(DriverError) as caught:
                driver.load(artifact(), 1)
            assert "cannot load" in str(caught.value)
        else:
            kernel = loaded(cuda, device=1)
            cuda.fail(function, code)
            with pytest.raises(DriverError) as caught:
                kernel.launch(7, 0, (16, 3))
            assert "cannot launch" in str(caught.value)
            assert "grid (7, 1, 1), block 128" in str(caught.value)
        error = caught.value
        label = artifact().label
        assert "probe[sm_90" in label
        for part in (label, "cuda:1 (Stand-in 1)", name, f"({code})", text, advice):
            assert part in str(error)
        assert (error.code, error.name, error.label, error.device) == (code, name, label, 1)

    def test_an_error_survives_the_way_between_processes(self, cuda):
        cuda.fail("cuModuleLoadData", 209)
        with pytest.raises(DriverError) as caught:
            driver.load(artifact(), 1)
        copy = pickle.loads(pickle.dumps(caught.value))
        assert str(copy) == str(caught.value)
        assert (copy.code, copy.name, copy.label, copy.device) == (
            209,
            "CUDA_ERROR_NO_BINARY_FOR_GPU",
            artifact().label,
            1,
        )

    def test_a_device_that_does_not_exist_is_named(self, cuda):
        with pytest.raises(DriverError, match=r"cannot open cuda:2: CUDA_ERROR_INVALID_DEVICE .*CUDA_VISIBLE_DEVICES"):
            driver.load(artifact(), 2)

    def test_a_machine_without_a_driver_is_told_so(self, tmp_path):
        driver.use_library(tmp_path / "libcuda.so.1")
        try:
            with pytest.raises(DriverError, match=r"no GPU driver: .*libcuda.so.1 cannot be opened"):
                driver.load(artifact(), 0)
        finally:
            driver.use_library(None)

    def test_a_driver_that_is_too_old_is_told_so(self):
        stand_in = CudaStandIn()
        del stand_in.library.cuLaunchKernelEx
        driver.use_library(stand_in.library)
        try:
            with pytest.raises(DriverError, match=r"too old: .*cuLaunchKernelEx.*; 520 or newer"):
                driver.load(artifact(), 0)
        finally:
            driver.use_library(None)


class TestDeviceInfo:
    def test_describes_a_gpu_without_a_context(self, cuda):
        cuda.set("capability", 120, index=1)
        info = driver.device_info(1)
        assert (info.device, info.backend, info.name, info.target) == (1, "cuda", "Stand-in 1", "sm_120")
        assert (info.driver, info.shared_limit, info.problem) == ("CUDA 13.0", 232448, None)
        assert driver.device_count() == 2
        assert cuda.calls("cuDevicePrimaryCtxRetain") == []

    def test_says_what_is_wrong_where_there_is_no_driver(self, tmp_path):
        driver.use_library(tmp_path / "libcuda.so.1")
        try:
            info = driver.device_info(0)
        finally:
            driver.use_library(None)
        assert info.problem.startswith("no GPU driver: ")
        assert (info.name, info.target, info.shared_limit) == ("", "", 0)

    def test_says_what_is_wrong_where_there_is_no_gpu(self, cuda):
        cuda.set("devices", 0)
        assert "CUDA_ERROR_NO_DEVICE" in driver.device_info(0).problem
        assert driver.device_count() == 0

    def test_says_what_is_wrong_where_the_driver_does_not_start(self, cuda):
        cuda.fail("cuInit", 100)
        assert "cannot initialise the GPU driver" in driver.device_info(0).problem
