"""Weights in files: written and read again, mapped and not copied; damaged and foreign files."""
from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from svod.core.ir.dtype import STORABLE, dtypes
from svod.errors import DeviceError, FormatError, UnsupportedError
from svod.nn import state
from svod.tensor import Tensor
from tests.tensor.strategies import make


def safetensors(header: Any, data: bytes = b"", length: int | None = None) -> bytes:
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    return (len(text) if length is None else length).to_bytes(8, "little") + text + data


def test_every_dtype_and_shape_there_and_back(tmp_path: Path) -> None:
    path = tmp_path / "w.safetensors"
    tensors = {d.name: Tensor(make((3, 5), d.name, i), dtype=d.name) for i, d in enumerate(STORABLE)}
    tensors |= {"empty": Tensor.zeros(0, 4), "scalar": Tensor(2.5), "lazy ü": Tensor(make((2, 2), "float32", 0)).add(1)}
    state.save_safetensors(tensors, path, {"format": "svod"})
    assert state.safetensors_metadata(path) == {"format": "svod"}
    found = state.load(path)
    assert found.keys() == tensors.keys()
    for name, t in tensors.items():
        assert found[name].dtype == t.dtype and found[name].shape == t.shape
        np.testing.assert_array_equal(found[name].numpy(), t.numpy())
    raw = path.read_bytes()
    length = int.from_bytes(raw[:8], "little")
    entries = [e for n, e in json.loads(raw[8:8 + length]).items() if n != "__metadata__"]
    ends = [0, *(e["data_offsets"][1] for e in entries)]
    assert (8 + length) % 64 == 0 and [e["data_offsets"][0] for e in entries] == ends[:-1], "no holes"
    assert not list(tmp_path.glob("*.part"))


def test_tensors_are_views_of_the_mapped_file(tmp_path: Path) -> None:
    path = tmp_path / "w.safetensors"
    a = make((4, 8), "float32", 1)
    state.save({"a": Tensor(a), "b": Tensor(a).bfloat16()}, path)
    found = state.load(path)
    one, two = (found[n]._values() for n in "ab")
    assert two.ctypes.data - one.ctypes.data == a.nbytes and not one.flags.writeable
    np.testing.assert_allclose(found["a"].matmul(found["b"].float().T).numpy(), a @ found["b"].numpy().T, rtol=1e-5, atol=1e-5)


def test_a_file_by_hand_and_elements_out_of_line(tmp_path: Path) -> None:
    path = tmp_path / "w.safetensors"
    values = np.array([1.5, -2], np.float32)
    path.write_bytes(safetensors({"odd": {"dtype": "U8", "shape": [1], "data_offsets": [0, 1]},
                                  "x": {"dtype": "F32", "shape": [2], "data_offsets": [1, 9]}}, b"\x07" + values.tobytes()))
    found = state.load_safetensors(path)
    np.testing.assert_array_equal(found["x"].numpy(), values)
    assert found["odd"].item() == 7


def test_damaged_and_foreign_files(tmp_path: Path) -> None:
    path = tmp_path / "w.safetensors"
    entry = {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]}
    for content, match in ((b"abc", "3 bytes are not a safetensors file"), (safetensors({}, length=1 << 40), "header of"),
                           (safetensors(b"{"), "not JSON"), (safetensors([]), "is a list"), (safetensors({"x": 3}), "entry of 'x'"),
                           (safetensors({"x": entry}, bytes(7)), "takes 8 bytes"),
                           (safetensors({"x": {**entry, "data_offsets": [0, 4]}}, bytes(8)), "takes 8 bytes"),
                           (safetensors({"x": {**entry, "shape": [-2]}}, bytes(8)), "entry of 'x'"),
                           (safetensors({"__metadata__": 3}), "__metadata__")):
        path.write_bytes(content)
        with pytest.raises(FormatError, match=match):
            state.safetensors_metadata(path)
            state.load(path)
    path.write_bytes(safetensors({"x": {**entry, "dtype": "F8_E4M3"}}, bytes(8)))
    with pytest.raises(UnsupportedError, match="'x' is 'F8_E4M3'; svod reads BOOL"):
        state.load(path)
    with pytest.raises(DeviceError, match="cannot be mapped"):
        state.load(tmp_path / "none.safetensors")
    for act in (lambda: state.load(tmp_path / "w.pt"), lambda: state.save({}, tmp_path / "w.pt")):
        with pytest.raises(UnsupportedError, match=r"\.safetensors and \.npz"):
            act()
    with pytest.raises(FormatError, match="__metadata__"):
        state.save_safetensors({"__metadata__": Tensor([1])}, path)


def test_numpy_archives(tmp_path: Path) -> None:
    path = tmp_path / "w.npz"
    tensors = {"a": Tensor(make((2, 3), "float32", 0)).mul(2), "b": Tensor([True, False])}
    state.save(tensors, path)
    found = state.load(path)
    for name, t in tensors.items():
        np.testing.assert_array_equal(found[name].numpy(), t.numpy())
    with pytest.raises(UnsupportedError, match="'x': NumPy has no bfloat16"):
        state.save({"x": Tensor([1.0]).bfloat16()}, path)
    np.savez(path, x=np.array([{}], object))
    with pytest.raises(FormatError, match="NumPy archive"):
        state.load(path)
    path.write_bytes(b"nothing of the kind")
    with pytest.raises(FormatError, match="NumPy archive"):
        state.load(path)


def test_names_of_dtypes_cover_what_tensors_can_be() -> None:
    assert {d.name for d in STORABLE} == set(state._NAMES) and state._DTYPES["BF16"] == dtypes.bfloat16
