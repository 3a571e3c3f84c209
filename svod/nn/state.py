"""Weights in files: safetensors and NumPy archives.

    weights = load("model.safetensors")            # {name: Tensor}; the file is mapped: pages are read when used, not copied
    save({"w": w, "b": b}, "model.safetensors")    # or .npz

A safetensors file has three parts (https://github.com/huggingface/safetensors#format): 8 bytes with the length n of the header (unsigned,
little-endian); n bytes of JSON, `{"name": {"dtype": "F32", "shape": [2, 3], "data_offsets": [begin, end]}, …, "__metadata__": {…}}`, padded
with spaces; and the data, which the offsets count from. svod starts the data at a multiple of 64 bytes and puts the widest elements first.
"""
from __future__ import annotations

import json
import math
import os
import zipfile
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from svod.core.graph import graph
from svod.core.graph.buffer import Array, buffer_from_bytes, map_file
from svod.core.ir.dtype import DType, dtypes
from svod.errors import FormatError, UnsupportedError
from svod.system.files import write_file
from svod.tensor import Tensor

__all__ = ["load", "load_npz", "load_safetensors", "safetensors_metadata", "save", "save_npz", "save_safetensors"]
_DTYPES: dict[str, DType] = {
    "BOOL": dtypes.bool, "U8": dtypes.uint8, "I8": dtypes.int8, "U16": dtypes.uint16, "I16": dtypes.int16, "U32": dtypes.uint32,
    "I32": dtypes.int32, "U64": dtypes.uint64, "I64": dtypes.int64, "F16": dtypes.float16, "BF16": dtypes.bfloat16, "F32": dtypes.float32,
    "F64": dtypes.float64}
_NAMES = {d.name: name for name, d in _DTYPES.items()}
MOST_HEADER = 100_000_000      # most bytes of a header, by the format
ALIGNMENT = 64

PathLike = str | os.PathLike[str]


def load(path: PathLike) -> dict[str, Tensor]:
    """The tensors of a `.safetensors` or `.npz` file by name. Raises FormatError, and UnsupportedError for another suffix."""
    reader = {".safetensors": load_safetensors, ".npz": load_npz}.get(Path(path).suffix)
    if reader is None:
        raise UnsupportedError(f"load of {os.fspath(path)}: svod reads .safetensors and .npz")
    return reader(path)


def save(tensors: Mapping[str, Tensor], path: PathLike) -> None:
    """Compute lazy tensors and write all tensors by name, in the format of the suffix: `.safetensors` or `.npz`. Raises
    UnsupportedError."""
    writer: Callable[..., None] | None = {".safetensors": save_safetensors, ".npz": save_npz}.get(Path(path).suffix)
    if writer is None:
        raise UnsupportedError(f"save to {os.fspath(path)}: svod writes .safetensors and .npz")
    writer(tensors, path)


# -- safetensors ----------------------------------------------------------------------------------------
def load_safetensors(path: PathLike) -> dict[str, Tensor]:
    """The tensors of a safetensors file by name, as read-only views of the mapped file. A tensor whose elements are not aligned to their
    size is copied at its first use. The file must not change while the tensors live. Raises DeviceError for a file that cannot be mapped,
    and FormatError."""
    mapped = map_file(path)
    header, start = _header(mapped, os.fspath(path))
    return {name: _mapped_tensor(mapped, start, name, entry, os.fspath(path)) for name, entry in header.items() if name != "__metadata__"}


def safetensors_metadata(path: PathLike) -> dict[str, str]:
    """The `__metadata__` of a safetensors file. Raises FormatError."""
    header, _ = _header(map_file(path), os.fspath(path))
    metadata = header.get("__metadata__", {})
    if not isinstance(metadata, dict) or not all(isinstance(v, str) for v in metadata.values()):
        raise FormatError(f"{os.fspath(path)}: __metadata__ must be an object of strings")
    return metadata


def _header(mapped: Array, path: str) -> tuple[dict[str, Any], int]:
    """(the parsed header, the offset of the data in the file)."""
    if mapped.size < 8:
        raise FormatError(f"{path}: {mapped.size} bytes are not a safetensors file")
    length = int.from_bytes(mapped[:8].tobytes(), "little")
    if length > min(MOST_HEADER, mapped.size - 8):
        raise FormatError(f"{path}: a header of {length} bytes in a file of {mapped.size}; the file is damaged or not a safetensors file")
    try:
        header = json.loads(mapped[8:8 + length].tobytes().decode("utf-8"))
    except (UnicodeDecodeError, json.JSONDecodeError, RecursionError) as error:
        raise FormatError(f"{path}: the header is not JSON: {error}") from error
    if not isinstance(header, dict):
        raise FormatError(f"{path}: the header is a {type(header).__name__}, not an object")
    return header, 8 + length


def _mapped_tensor(mapped: Array, start: int, name: str, entry: Any, path: str) -> Tensor:
    def is_size(n: object) -> bool:
        return isinstance(n, int) and not isinstance(n, bool) and n >= 0
    shape, offsets = (entry.get(k) if isinstance(entry, dict) else None for k in ("shape", "data_offsets"))
    if not isinstance(shape, list) or not all(map(is_size, shape)) or not isinstance(offsets, list) or len(offsets) != 2 \
            or not all(map(is_size, offsets)):
        raise FormatError(f"{path}: the entry of {name!r} needs dtype, shape and data_offsets, found {entry!r}")
    dtype = _DTYPES.get(entry.get("dtype"))
    if dtype is None:
        raise UnsupportedError(f"{path}: {name!r} is {entry.get('dtype')!r}; svod reads {', '.join(_DTYPES)}")
    size = math.prod(shape)
    begin, end = offsets
    if end - begin != size * dtype.itemsize or start + end > mapped.size:
        raise FormatError(f"{path}: {name!r}, {dtype.name}{shape}, takes {size * dtype.itemsize} bytes; data_offsets are {begin} … {end} "
                          f"of {mapped.size - start}")
    if size == 0:
        return Tensor.full(tuple(shape), 0, dtype)
    return Tensor.from_uop(graph.reshape(buffer_from_bytes(mapped, start + begin, dtype, size), shape))


def save_safetensors(tensors: Mapping[str, Tensor], path: PathLike, metadata: Mapping[str, str] | None = None) -> None:
    """Compute lazy tensors in one schedule and write all tensors by name. A process that has mapped an old file of that name keeps the
    old content. Raises FormatError for a tensor named `__metadata__`."""
    if "__metadata__" in tensors:
        raise FormatError("save_safetensors: a tensor cannot be named '__metadata__'")
    Tensor.realize_batch(tensors.values())
    header: dict[str, Any] = {} if metadata is None else {"__metadata__": dict(metadata)}
    # the widest elements first: then all are aligned without gaps between them, which the format forbids
    ordered = {name: tensors[name] for name in sorted(tensors, key=lambda name: -tensors[name].element_size())}
    end = 0
    for name, tensor in ordered.items():
        header[name] = {"dtype": _NAMES[tensor.dtype.name], "shape": list(tensor.shape), "data_offsets": [end, end + tensor.nbytes]}
        end += tensor.nbytes
    text = json.dumps(header, separators=(",", ":"), ensure_ascii=False).encode()
    text += b" " * (-(8 + len(text)) % ALIGNMENT)

    def write(file: Any) -> None:
        file.write(len(text).to_bytes(8, "little") + text)
        for tensor in ordered.values():
            file.write(tensor._values().reshape(-1).view(np.uint8).data if tensor.numel() else b"")
    write_file(Path(path), write)


# -- NumPy archives ---------------------------------------------------------------------------------------
def load_npz(path: PathLike) -> dict[str, Tensor]:
    """The arrays of an .npz file by name. Nothing is unpickled. Raises FormatError."""
    try:
        with np.load(path, allow_pickle=False) as archive:
            return {name: Tensor(archive[name]) for name in archive.files}
    except (OSError, ValueError, zipfile.BadZipFile) as error:
        raise FormatError(f"{os.fspath(path)} cannot be read as a NumPy archive: {error}") from error


def save_npz(tensors: Mapping[str, Tensor], path: PathLike) -> None:
    """Write tensors by name, uncompressed. Raises UnsupportedError for bfloat16, which NumPy does not have."""
    narrow = [name for name, t in tensors.items() if t.dtype == dtypes.bfloat16]
    if narrow:
        raise UnsupportedError(f"save_npz of {narrow[0]!r}: NumPy has no bfloat16; write .safetensors, or cast the tensor")
    Tensor.realize_batch(tensors.values())
    write_file(Path(path), lambda file: np.savez(file, **{name: t.numpy() for name, t in tensors.items()}))  # type: ignore[arg-type]


def __dir__() -> list[str]:
    """The public names, for completion."""
    return sorted(__all__)
