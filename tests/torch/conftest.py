"""Tests of the front end for PyTorch need torch; without it they are skipped."""
from __future__ import annotations

import importlib.util
from pathlib import Path

import pytest


def pytest_ignore_collect(collection_path: Path) -> bool | None:
    """Without torch, leave out the modules of this folder, which import it; `test_without_torch.py` stays."""
    return True if importlib.util.find_spec("torch") is None and collection_path.name != "test_without_torch.py" else None


@pytest.fixture(autouse=True)
def _no_gradients() -> object:
    import torch

    with torch.no_grad():
        yield
