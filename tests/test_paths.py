"""Files that users name: what cannot be read or written is told by one error, with the path and what to do."""
from __future__ import annotations

import os
import re
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

import svod
from svod import Tensor
from svod.errors import FileError, SvodError
from svod.nn import state

X = np.ones((4, 4), np.float32)


def _load_onnx(path: Path) -> object:
    return pytest.importorskip("svod.onnx").load(path)


WRITERS: dict[str, Callable[[Path], object]] = {
    "kernel.object": lambda path: svod.kernel(Tensor(X) + 1).object(path),
    "steps.save": lambda path: svod.kernel(Tensor(X) + 1).steps().save(path),
    "plan.object": lambda path: (Tensor(X) + 1).prepare().kernels[0].object(path),
    "explain": lambda path: svod.explain(Tensor(X) + 1, html=path),
    "save_npz": lambda path: state.save_npz({"x": Tensor(X)}, path),
    "save_safetensors": lambda path: state.save_safetensors({"x": Tensor(X)}, path)}


EXPLAIN = pytest.param("explain", marks=pytest.mark.slow)       # a page of all steps of a plan takes a second


@pytest.mark.parametrize("name", [*(name for name in WRITERS if name != "explain"), EXPLAIN])
def test_what_cannot_be_written(name: str, tmp_path: Path) -> None:
    for path, reason in ((tmp_path / "missing" / "file", "No such file or directory; make its directory first"),
                         (tmp_path, "Is a directory; name a file in it")):
        with pytest.raises(FileError, match=f"^{re.escape(str(path))} cannot be written: {reason}") as raised:
            WRITERS[name](path)
        assert isinstance(raised.value, SvodError) and isinstance(raised.value, OSError) and raised.value.errno
    assert not any(tmp_path.iterdir())
    WRITERS[name](tmp_path / "file")
    assert os.listdir(tmp_path) == ["file"]


@pytest.mark.parametrize("name", ["steps.save", EXPLAIN])
def test_a_page_replaces_pages_and_nothing_else(name: str, tmp_path: Path) -> None:
    path = tmp_path / "steps.html"
    for other in ("import svod\n", "<!doctype html>\n<title>somebody's page</title>\n"):
        path.write_text(other)
        with pytest.raises(FileError, match=f"^{re.escape(str(path))} is no page of svod's, and would be lost; name another file"):
            WRITERS[name](path)
        assert path.read_text() == other
    for old in ("", "<!doctype html>\n<html lang=en>\n<meta charset=utf-8>\n<title>what takes the time · svod</title>\n"):
        path.write_text(old)    # an empty file is replaced, a page of a version that did not mark them, and then the page
        WRITERS[name](path)
    for _ in range(2):
        WRITERS[name](path)
    assert path.read_text().startswith("<!doctype html>") and os.listdir(tmp_path) == ["steps.html"]


@pytest.mark.parametrize("read", [_load_onnx])
def test_what_cannot_be_read(read: Callable[[Path], object], tmp_path: Path) -> None:
    for path, reason in ((tmp_path / "missing", "No such file or directory; name a file that exists"),
                         (tmp_path, "Is a directory; name a file in it")):
        with pytest.raises(FileError, match=f"{re.escape(str(path))} cannot be read: {reason}"):
            read(path)
