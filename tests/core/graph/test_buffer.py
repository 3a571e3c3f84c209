"""Buffers over mapped files: kernels use them in place, and buffers beyond the end of a file are refused."""
from __future__ import annotations

import gc
import os
from pathlib import Path

import numpy as np
import pytest

from svod import Tensor
from svod.core.graph import graph
from svod.core.graph.allocator import LARGE_ARRAYS
from svod.core.graph.buffer import Buffer, buffer_from_bytes, buffer_of, give_back, map_file
from svod.core.graph.storage import base_of
from svod.core.ir.dtype import DType, dtypes
from svod.errors import DeviceError


def tensor_at(mapped: np.ndarray, offset: int, dtype: DType, shape: tuple[int, ...]) -> Tensor:
    return Tensor.from_uop(graph.reshape(buffer_from_bytes(mapped, offset, dtype, int(np.prod(shape))), shape))


def resident() -> int:
    """Return the resident memory of this process in bytes."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


@pytest.mark.skipif(not Path("/proc/self/statm").exists(), reason="resident memory is read from /proc")
def test_a_file_of_two_gigabytes_is_mapped_and_only_what_is_used_is_read(tmp_path: Path) -> None:
    path, at, n = tmp_path / "weights", 1 << 30, 1 << 20
    with open(path, "wb") as file:
        file.truncate(2 << 30)      # a hole: the file takes no room on the disk
        file.seek(at)
        file.write(np.arange(n, dtype=np.float32).tobytes())
    y = Tensor(np.ones(n, np.float32))
    (Tensor(np.ones(n, np.float32)) * y).realize()      # the compiler and the pool have taken what they take
    gc.collect()        # garbage of other tests is not freed during this one
    LARGE_ARRAYS.release()
    before = resident()
    mapped = map_file(path)
    weights = [tensor_at(mapped, i << 27, dtypes.float32, (1 << 25,)) for i in range(16)]
    weights += [tensor_at(mapped, (i << 27) + 1, dtypes.float32, (1 << 24,)) for i in range(15)]     # out of line: copied when used
    assert resident() - before < 4 << 20
    part = (weights[8][:n] * y).realize()
    assert part.tolist()[-1] == n - 1
    assert 2 * 4 * n <= resident() - before + (4 << 20) < 64 << 20      # the part of the file, the result, and the list


@pytest.mark.skipif(not Path("/proc/self/statm").exists(), reason="resident memory is read from /proc")
def test_pages_of_a_file_are_given_back_and_read_again(tmp_path: Path) -> None:
    n = 8 << 20
    np.arange(n, dtype=np.int32).tofile(tmp_path / "f")
    mapped = map_file(tmp_path / "f")
    part = mapped[4:4 * n - 8].view(np.int32)
    total, before = int(part.sum(dtype=np.int64)), resident()
    give_back(part)
    assert before - resident() > 3 * n and int(part.sum(dtype=np.int64)) == total
    for own in (np.arange(n), np.arange(n)[3:], np.memmap(tmp_path / "f", np.int32, "c")):     # memory that no file has: it stays
        own[-1] = 5
        give_back(own)
        assert own[-1] == 5


def test_parts_of_a_file_are_views_of_it(tmp_path: Path) -> None:
    values = np.arange(24, dtype=np.int16)
    (tmp_path / "f").write_bytes(b"head" + values.tobytes())
    mapped = map_file(tmp_path / "f")
    t = tensor_at(mapped, 4 + 2 * 4, dtypes.int16, (4, 5))
    memory = buffer_of(base_of(t.uop))
    assert np.shares_memory(memory.array, mapped) and memory.read_only
    np.testing.assert_array_equal(t.numpy(), values[4:].reshape(4, 5))
    np.testing.assert_array_equal((t.permute(1, 0) + 1).numpy(), values[4:].reshape(4, 5).T + 1)
    bits = tensor_at(mapped, 4, dtypes.bfloat16, (3,))
    assert bits.dtype == dtypes.bfloat16 and np.shares_memory(buffer_of(base_of(bits.uop)).array, mapped)
    # elements that are not aligned to their size are copied when the buffer's memory is first used
    odd = tensor_at(mapped, 5, dtypes.int16, (3,))
    assert not buffer_of(base_of(odd.uop)).is_allocated and buffer_of(base_of(odd.uop)).read_only
    assert not np.shares_memory(buffer_of(base_of(odd.uop)).array, mapped) and buffer_of(base_of(odd.uop)).read_only
    np.testing.assert_array_equal(odd.numpy(), np.frombuffer(values.tobytes()[1:7], np.int16))
    del mapped
    assert t.numpy()[0, 0] == 4


def test_what_cannot_be_mapped_is_said(tmp_path: Path) -> None:
    with pytest.raises(DeviceError, match=r"missing cannot be mapped: .*No such file"):
        map_file(tmp_path / "missing")
    with pytest.raises(DeviceError, match="cannot be mapped"):
        map_file(tmp_path)
    (tmp_path / "empty").touch()
    empty = map_file(tmp_path / "empty")
    assert empty.size == 0 and tensor_at(empty, 0, dtypes.float32, (0, 3)).numpy().shape == (0, 3)
    for offset, size in ((0, 1), (-4, 1), (4, 0)):
        with pytest.raises(DeviceError, match="there are 0"):
            buffer_from_bytes(empty, offset, dtypes.float32, size)


@pytest.mark.parametrize("array", [np.zeros(6, np.float64), np.zeros(5, np.float32), np.zeros((2, 3), np.float32),
                                   np.zeros(12, np.float32)[::2]])
def test_memory_of_another_dtype_size_or_layout_is_refused(array: np.ndarray) -> None:
    buffer = Buffer(dtypes.float32, 6)
    with pytest.raises(DeviceError, match=r"memory for 6 elements of float32: got .* pass a flat contiguous array"):
        buffer.bind(array)
    assert not buffer.is_allocated


def test_what_has_no_memory() -> None:
    with pytest.raises(DeviceError, match="ADD has no storage of its own"):
        buffer_of((Tensor([1.0]) + Tensor([2.0])).uop)
