"""AMD's runtime, on a stand-in only: no AMD GPU has run this."""

from __future__ import annotations

import struct

import pytest
from fake_driver import artifact
from fake_driver_fixtures import hip_fixture

from flashattn.jit import driver
from flashattn.jit.driver import DriverError

hip = hip_fixture


class TestHip:
    """On a stand-in only: no AMD GPU has run this."""

    def test_passes_every_parameter_the_shape_and_the_stream(self, hip):
        kernel = driver.load(artifact(target="gfx942", shared=60000), 1)
        kernel.launch(5, 0xABCDEF012345, (0xFFFF_8000_0000_0010, -3))
        (call,) = hip.launches()
        assert (call.grid, call.block, call.shared) == ((5, 1, 1), (256, 1, 1), 60000)
        assert (call.name, call.stream) == ("probe", 0xABCDEF012345)
        assert call.params == [struct.pack("<Q", 0xFFFF_8000_0000_0010), struct.pack("<i", -3), bytes(8), bytes(8)]
        assert [c.device for c in hip.calls("hipModuleLoadData")] == [1]
        assert [c.mode for c in hip.calls("hipModuleLoadData")] == [2]
        assert hip.current() == 0

    def test_refuses_what_does_not_fit(self, hip):
        with pytest.raises(DriverError, match="compiled for gfx950, the device is gfx942"):
            driver.load(artifact(target="gfx950"), 0)
        with pytest.raises(DriverError, match="wants 65537 bytes of shared memory, the device allows 65536"):
            driver.load(artifact(target="gfx942", shared=65537), 0)
        with pytest.raises(DriverError, match="clusters, programmatic and cooperative launches"):
            driver.load(artifact(target="gfx942", num_ctas=2), 0)

    def test_an_error_names_the_kernel_and_the_device(self, hip):
        kernel = driver.load(artifact(target="gfx942"), 1)
        hip.fail("hipModuleLaunchKernel", 700)
        with pytest.raises(
            DriverError, match=r"cannot launch probe\[gfx942 .* on hip:1 .*grid \(7, 1, 1\).*\(700\)"
        ) as caught:
            kernel.launch(7, 0, (16, 3))
        assert caught.value.code == 700

    def test_grids_and_arguments_are_checked(self, hip):
        kernel = driver.load(artifact(target="gfx942"), 0)
        kernel.launch(0, 0, (16, 3))
        with pytest.raises(ValueError, match="0 to 16777215 programs, got 16777216"):
            kernel.launch(2**24, 0, (16, 3))
        with pytest.raises(TypeError, match="parameter n of type i32"):
            kernel.launch(1, 0, (16, None))
        with pytest.raises(TypeError, match="the grid or the stream"):
            kernel.launch(1, "0", (16, 3))
        assert hip.launches() == []

    def test_describes_a_gpu(self, hip):
        info = driver.device_info(1, "hip")
        assert (info.name, info.target, info.driver) == ("Stand-in 1", "gfx942", "HIP 6.4")
        assert (info.shared_limit, info.problem) == (65536, None)
        assert driver.device_count("hip") == 2
