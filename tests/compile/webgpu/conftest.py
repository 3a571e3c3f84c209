"""Fixtures of the WebGPU tests, which need an adapter; without one they are skipped with the reason."""
from __future__ import annotations

import pytest

from svod.compile.webgpu.adapter import adapter_target
from svod.core.machine.target import Target
from svod.errors import DeviceError


@pytest.fixture(scope="session")
def webgpu() -> Target:
    """The first adapter as a target."""
    try:
        return adapter_target()
    except DeviceError as error:
        pytest.skip(str(error))
