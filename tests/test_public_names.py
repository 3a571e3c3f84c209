"""Names that `dir` and completion show of the modules that users import: the public ones, and none that a module needs itself."""
from __future__ import annotations

import importlib
from types import ModuleType

import pytest

import svod

PUBLIC = {"svod": (), "svod.nn": (), "svod.nn.functional": (), "svod.nn.state": (), "svod.fft": (), "svod.linalg": (),
          "svod.onnx": ("onnx",),
          "svod.torch": ("torch",)}


@pytest.mark.parametrize("name", PUBLIC)
def test_only_public_names_are_shown(name: str) -> None:
    for package in PUBLIC[name]:
        pytest.importorskip(package)
    parent, _, last = name.rpartition(".")
    module = getattr(importlib.import_module(parent), last) if parent else svod
    shown = [n for n in dir(module) if n != "__version__"]
    assert shown == sorted(shown) and shown
    for n in shown:
        value = getattr(module, n)
        assert not n.startswith("_")
        assert isinstance(value, type) or getattr(value, "__module__", "svod").startswith("svod"), (n, value)
        assert not isinstance(value, ModuleType) or value.__name__.startswith("svod."), (n, value)


def test_what_is_shown_is_what_the_pages_name() -> None:
    assert dir(svod.fft) == ["fft", "fft2", "fftfreq", "fftn", "fftshift", "ifft", "ifft2", "ifftn", "ifftshift", "irfft", "irfft2",
                             "irfftn", "rfft", "rfft2", "rfftfreq", "rfftn"]
    pytest.importorskip("torch")
    assert dir(importlib.import_module("svod.torch")) == ["compile", "report"]
