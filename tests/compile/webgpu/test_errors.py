"""Errors of WebGPU: one sentence names the missing part and says what to do. The tests need no adapter."""
from __future__ import annotations

import importlib.util
from typing import Any

import pytest

from svod import Tensor
from svod.compile.webgpu import adapter
from svod.config import PrepareConfig
from svod.errors import DeviceError


@pytest.fixture(autouse=True)
def fresh(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(adapter, "_target", adapter._target.__wrapped__)        # the target cached in this process is bypassed


def message() -> str:
    with pytest.raises(DeviceError) as raised:
        (Tensor([1.0, 2.0]) * 2).prepare(PrepareConfig(device="WEBGPU", db=":none:"))
    return str(raised.value)


def test_without_the_package(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(adapter, "_adapters", adapter._adapters.__wrapped__)
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    assert message() == "WEBGPU needs the package wgpu, which is not installed; pip install 'svod[webgpu]'"


def test_with_a_package_that_does_not_load(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(name: str) -> Any:
        raise OSError("libwgpu_native.so: cannot open shared object file")
    monkeypatch.setattr(adapter, "_adapters", adapter._adapters.__wrapped__)
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: True)
    monkeypatch.setattr(importlib, "import_module", broken)
    with pytest.raises(DeviceError, match=r"wgpu, which WEBGPU needs, does not load \(libwgpu.*\); install it again"):
        adapter.adapters()


def test_without_an_adapter(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(adapter, "_adapters", lambda process: [])
    said = message()
    assert said.startswith("WEBGPU finds no adapter") and said.endswith(adapter.INSTALL)
