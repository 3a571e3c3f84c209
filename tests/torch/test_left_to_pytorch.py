"""Operations with PyTorch's own rounding are run by PyTorch, and reported as such."""
from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

import pytest

torch = pytest.importorskip("torch", reason="the package torch is not installed")
import torch.nn.functional as F  # noqa: E402

import svod.torch  # noqa: E402

IMAGE = torch.arange(48, dtype=torch.uint8).reshape(1, 1, 6, 8) * 5


class Module(torch.nn.Module):  # type: ignore[misc]
    def __init__(self, function: Callable[..., Any]) -> None:
        super().__init__()
        self.function = function

    def forward(self, *args: Any) -> Any:
        return self.function(*args)


@pytest.mark.parametrize(("name", "function"), [
    ("arange", lambda x: torch.arange(0.5, 5, 1.2, dtype=torch.int32) + x.sum()),
    ("arange", lambda x: torch.arange(0.5, 5, 1.2, dtype=torch.int64) + x.sum()),
    ("linspace", lambda x: torch.linspace(-3, 9, 5, dtype=torch.int32) + x.sum()),
    ("upsample", lambda x: F.interpolate(x, (9, 5), mode="bilinear")),
    ("upsample", lambda x: F.interpolate(x, (4, 11), mode="bicubic"))])
def test_rounding_that_depends_on_the_dtype(name: str, function: Callable[..., Any], caplog: pytest.LogCaptureFixture) -> None:
    module = Module(function)
    with caplog.at_level(logging.WARNING, "svod.torch"):
        compiled = svod.torch.compile(module, IMAGE)
        found = compiled(IMAGE)
    wanted = module(IMAGE)
    assert found.dtype == wanted.dtype and found.shape == wanted.shape and torch.equal(found, wanted)
    assert "run by PyTorch" in caplog.text and name in caplog.text
