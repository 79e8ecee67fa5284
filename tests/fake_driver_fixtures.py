"""Fixtures that put a stand-in behind flashattn.jit.driver. A test module takes one by name: `cuda = cuda_fixture`."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
from fake_driver import HAS_COMPILER, NO_COMPILER, CStandIn, artifact, build
from fake_driver_python import CudaStandIn, HipStandIn

from flashattn.jit import driver


@pytest.fixture(params=["stand-in in C", "stand-in in Python"])
def cuda_fixture(request, tmp_path, tmp_path_factory):
    """A driver with two sm_90 devices, used by flashattn.jit.driver."""
    if request.param == "stand-in in Python":
        stand_in = CudaStandIn()
    elif HAS_COMPILER:
        stand_in = CStandIn(copy_of_library(tmp_path / "fake", tmp_path_factory))
    else:
        pytest.skip(NO_COMPILER)
    driver.use_library(stand_in.library)
    yield stand_in
    driver.use_library(None)


@pytest.fixture
def hip_fixture():
    """An AMD runtime with two gfx942 devices, used by flashattn.jit.driver."""
    stand_in = HipStandIn()
    driver.use_library(stand_in.library, "hip")
    yield stand_in
    driver.use_library(None, "hip")


def copy_of_library(folder: Path, tmp_path_factory) -> Path:
    """A libcuda.so.1 in `folder`, compiled once a session. Each copy has a state of its own."""
    once = tmp_path_factory.getbasetemp() / "fake_libcuda"
    if not once.exists():
        once.mkdir()
        build(once)
    folder.mkdir()
    return Path(shutil.copy(once / "libcuda.so.1", folder))


def loaded(cuda, device=0, **changes):
    """A kernel of (pointer, i32), and the device of its launches current on this thread."""
    kernel = driver.load(artifact(**changes), device)
    cuda.make_current(device)
    return kernel
