"""docs/operations.md names every public operation of Tensor, and no other names."""
from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import pytest

import svod
from svod import nn
from svod.tensor import Tensor

PAGE = (Path(__file__).resolve().parents[2] / "docs" / "operations.md").read_text(encoding="utf-8")


@pytest.fixture(scope="module", autouse=True)
def evaluator() -> Iterator[None]:
    """Once: nothing is evaluated here."""
    yield


def test_the_page_names_every_operation() -> None:
    named = set(re.findall(r"`(\w+)`", PAGE))
    operations = {name for name in dir(Tensor) if not name.startswith("_")}
    assert not operations - named, "missing on the page"
    first_columns = re.findall(r"^\| (`.*?) \|", PAGE, re.M)
    listed = {n for column in first_columns for n in re.findall(r"`(\w+)`", column)} - {"where"}
    assert not listed - operations and hasattr(svod, "where"), "on the page, and nowhere else"


def test_the_page_names_layers_that_exist() -> None:
    text = re.sub(r"(\w+)1d/2d/3d", r"\g<1>1d, \g<1>2d, \g<1>3d", PAGE.split("`svod.nn`: ")[1].split(";")[0])
    layers = re.findall(r"\b[A-Z]\w+", text)
    assert len(layers) > 20 and all(hasattr(nn, n) for n in layers)
