"""Fixtures for tests on GPUs. Tests with the mark `gpu` need an NVIDIA GPU; without one they are skipped with the reason."""
from __future__ import annotations

import pytest

from svod.compile.backend import Device, backend_named, device_named
from svod.errors import DeviceError
from tests.compile.cuda.fake_driver import FakeDriver, stand_in
from tests.compile.cuda.test_core_suite import H100


@pytest.fixture(scope="session")
def gpu() -> Device:
    """The first GPU."""
    try:
        device = device_named("CUDA")
        device.backend.target()
    except DeviceError as e:
        pytest.skip(str(e))
    return device


@pytest.fixture
def fake(monkeypatch: pytest.MonkeyPatch) -> FakeDriver:
    """The device CUDA with `FakeDriver` as driver: a small GPU whose kernels run on the CPU."""
    driver = FakeDriver()
    stand_in(driver, monkeypatch)
    return driver


@pytest.fixture(params=["stand-in", pytest.param("GPU", marks=pytest.mark.gpu)])
def cuda(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> FakeDriver | None:
    """The device CUDA: once with `FakeDriver`, once on a GPU."""
    if request.param == "GPU":
        request.getfixturevalue("gpu")
        return None
    driver = FakeDriver(sizes=H100)
    stand_in(driver, monkeypatch)
    return driver


@pytest.fixture
def cuda_pair(cuda: FakeDriver | None) -> FakeDriver | None:
    """`cuda` with two GPUs."""
    try:
        backend_named("CUDA:1").target()
    except DeviceError as e:
        pytest.skip(str(e))
    return cuda
