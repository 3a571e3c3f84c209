"""The allocator of large arrays: no memory is shared by two live arrays; it is reused when the last view is gone; the kept memory is
bounded; threads and forked children may use it."""
from __future__ import annotations

import errno
import gc
import mmap
import os
import random
from concurrent.futures import ThreadPoolExecutor
from itertools import pairwise

import numpy as np
import pytest

import svod.core.graph.allocator as allocator_module
from svod import Tensor
from svod.core.graph.allocator import HUGE_PAGE, LARGE_ARRAYS, OWN_BLOCK_BYTES, Allocator, private_memory
from svod.core.graph.buffer import aligned_empty
from svod.core.ir.dtype import dtypes

PAGE = 4096


def address(array: np.ndarray) -> int:
    return int(array.__array_interface__["data"][0])


def churn(allocator: Allocator, seed: int, steps: int = 150) -> None:
    """Allocate and free arrays at random; each is filled with a unique number, which must not change as long as the array lives."""
    rng = random.Random(seed)
    live: list[tuple[int, np.ndarray]] = []
    for step in range(steps):
        if live and rng.random() < 0.5:
            mark, array = live.pop(rng.randrange(len(live)))
            assert (array == mark % 251).all()
        else:
            array = allocator.allocate(rng.choice((1, PAGE, 3 * PAGE + 1, 10 * PAGE, 11 * PAGE)))
            assert address(array) % PAGE == 0 and array.flags.writeable
            mark = seed * steps + step
            array[:] = mark % 251
            # views keep the memory, the array itself may go
            live.append((mark, array[::2].reshape(-1) if rng.random() < 0.5 else array[:].view(np.uint8)))
    spans = sorted((address(a), address(a) + a.nbytes) for _, a in live)
    assert all(end <= begin for (_, end), (begin, _) in pairwise(spans))


def test_live_arrays_are_left_alone_in_four_threads() -> None:
    allocator = Allocator(64 * PAGE)
    with ThreadPoolExecutor(4) as pool:
        for done in [pool.submit(churn, allocator, seed) for seed in range(12)]:
            done.result()
    gc.collect()
    assert 0 <= allocator.kept == sum(map(len, allocator._free)) <= 64 * PAGE


def test_memory_is_used_again_by_arrays_of_nearly_its_size_once_the_last_view_is_gone() -> None:
    allocator = Allocator(100 * PAGE)
    a = allocator.allocate(10 * PAGE)
    where, view = address(a), a[5:].view(np.int8)[::3]
    del a
    assert address(allocator.allocate(10 * PAGE)) != where, "a view lives"
    del view
    small, large = allocator.allocate(7 * PAGE), allocator.allocate(10 * PAGE + 1)
    assert where not in (address(small), address(large))
    again = allocator.allocate(9 * PAGE)
    assert address(again) == where and again.nbytes == 9 * PAGE


def test_what_is_kept_is_bounded_and_the_oldest_goes_first() -> None:
    allocator = Allocator(4 * PAGE)
    blocks = [allocator.allocate(PAGE * n) for n in (1, 2, 1, 1)]
    del blocks[0], blocks[0]
    assert allocator.kept == 3 * PAGE
    del blocks[0], blocks[0]
    assert [len(m) // PAGE for m in allocator._free] == [2, 1, 1] and allocator.kept == 4 * PAGE
    big = allocator.allocate(5 * PAGE)
    del big
    assert allocator.kept == 4 * PAGE, "larger than all that may be kept"
    assert allocator.release() == 4 * PAGE and not allocator._free and not allocator.kept


def test_a_block_that_returns_while_the_lock_is_held_waits_for_nobody() -> None:
    allocator = Allocator(4 * PAGE)
    a = allocator.allocate(PAGE)
    with allocator._lock:       # as if the garbage collector ran inside `allocate`
        del a
    assert allocator.kept == 0
    allocator.allocate(PAGE)
    assert allocator.kept == PAGE


@pytest.mark.filterwarnings("error::pytest.PytestUnraisableExceptionWarning")
def test_a_block_comes_back_when_the_names_of_modules_are_gone(monkeypatch: pytest.MonkeyPatch) -> None:
    """As at the end of the program."""
    allocator = Allocator(1 << 30)
    memory = allocator.allocate(OWN_BLOCK_BYTES)
    for name in [n for n in vars(allocator_module) if not n.startswith("__")]:
        monkeypatch.setattr(allocator_module, name, None)
    del memory
    gc.collect()
    assert allocator.kept >= OWN_BLOCK_BYTES


def test_where_the_system_has_no_memory_what_is_kept_goes_first(monkeypatch: pytest.MonkeyPatch) -> None:
    allocator, system = Allocator(8 * PAGE), private_memory
    allocator.allocate(PAGE)

    def full(length: int) -> mmap.mmap:
        if allocator.kept or length > 4 * PAGE:
            raise OSError(errno.ENOMEM, "Cannot allocate memory")
        return system(length)
    monkeypatch.setattr("svod.core.graph.allocator.private_memory", full)
    assert allocator.kept == PAGE
    array = allocator.allocate(3 * PAGE)
    assert array.nbytes == 3 * PAGE and allocator.kept == 0
    with pytest.raises(MemoryError, match="no memory"):
        allocator.allocate(5 * PAGE)


def test_systems_without_huge_pages(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mmap, "MADV_HUGEPAGE", 1 << 20, raising=False)      # an advice that no kernel knows
    with pytest.raises(OSError), private_memory(PAGE) as memory:
        memory.madvise(mmap.MADV_HUGEPAGE)
    assert Allocator(0).allocate(HUGE_PAGE).nbytes == HUGE_PAGE


@pytest.mark.skipif(not hasattr(os, "fork"), reason="the system has no fork")
def test_a_child_forked_while_the_lock_is_held_allocates() -> None:
    allocator = Allocator(4 * PAGE)
    kept = allocator.allocate(PAGE)
    kept[:] = 7
    with allocator._lock:
        child = os.fork()
        if child == 0:
            kept[:] = 9         # the child's own copy
            os._exit(0 if allocator.allocate(PAGE).nbytes == PAGE else 1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0 and (kept == 7).all()


def test_results_of_realize_come_from_there() -> None:
    n = OWN_BLOCK_BYTES // 4
    x = Tensor(np.ones(n, np.float32))
    y = (x + 1).realize()
    where = address(np.asarray(y, copy=False))
    assert where % PAGE == 0
    del y
    z = (x * 3).realize()
    assert address(np.asarray(z, copy=False)) == where and z.numpy().min() == z.numpy().max() == 3
    kept = LARGE_ARRAYS.kept
    small = aligned_empty(n - 1, dtypes.float32)
    del small
    assert LARGE_ARRAYS.kept == kept, "below a megabyte the C library does it"
