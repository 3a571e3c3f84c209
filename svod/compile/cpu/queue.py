"""The launch queue of the CPU: a plan's launches are records in one block of words, and one native call runs them.

    words    header | records by kernel | launches by variant | arguments by kernel | variables by kernel

    variant    copies of the records in order of level, a group's record for kernels that run at the same time | records inside groups

The native runtime reads the block (layout: `svod.compile.cpu.runtime`). Binding an address or setting a variable writes into it.
A level is a set of kernels that do not depend on each other. Its single-core kernels run at the same time if that saves more than other
cores take to begin: they become one launch, a group, whose iterations are the kernels.
"""
from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple

import numpy as np

from svod.compile.cpu import runtime as rt
from svod.compile.cpu.interpreted import InterpretedProgram
from svod.compile.cpu.pool import Pool, fit_launch
from svod.compile.llvm.loaded import LoadedProgram
from svod.compile.plan.plan_parts import (
    Launches,
    PreparedKernel,
    Segment,
    Variant,
    address_of,
    kernel_name,
    levels_of,
    names_of,
    run_together,
    temporary_numbers,
)
from svod.errors import LaunchError
from svod.system.process.cores import usable_cores

_GROUP_CHUNKS = 8       # chunks per thread for the kernels of a level: taking a chunk costs more than a small kernel
_FEW_PLACES = 16        # most words that are written one by one; above this number one assignment of NumPy's is faster
_HEADER, _LAUNCH = rt.PLAN_BYTES // 8, rt.LAUNCH_BYTES // 8     # in words
RECORDS, COUNT, POOL, SCRATCH, REPEATS = (offset // 8 for offset in (
    rt.PLAN_RECORDS, rt.PLAN_COUNT, rt.PLAN_POOL, rt.PLAN_SCRATCH, rt.PLAN_REPEATS))
Words = np.ndarray[Any, np.dtype[np.int64]]
ENTRY, ARGS, VARS, BEGIN, END, THREADS, CHUNKS = (offset // 8 for offset in (
    rt.LAUNCH_ENTRY, rt.LAUNCH_ARGS, rt.LAUNCH_VARS, rt.LAUNCH_BEGIN, rt.LAUNCH_END, rt.LAUNCH_THREADS, rt.LAUNCH_CHUNKS))


class _VariedPhases(NamedTuple):
    """The phases of `vary`. `threads`: the threads of each; `words`: for each of their records the words of its range, threads and chunks;
    `numbers`: the positions of the records' phases among all."""

    threads: list[int]
    words: Words
    numbers: Words


class CpuQueue:
    """The `svod.compile.backend.LaunchQueue` of the CPU. Its `Launches` hold the address of their first record and the number of
    records."""

    def __init__(self, kernels: Sequence[PreparedKernel], variants: Sequence[Variant], addresses: Sequence[int],
                 threads: int | None) -> None:
        self._interpreted: dict[InterpretedProgram, InterpretedProgram] = {}
        self._entries = [self._entries_of(k) for k in kernels]
        self.may_fail = bool(self._interpreted)
        self._kernels = tuple(kernels)
        self._native = rt.runtime()
        self._run = self._native.run_plan
        levels = {v: [[v.kernels[i] for i in group] for group in levels_of(v.chosen)] for v in variants}
        wanted = max((phase.threads for k in kernels for phase in k.spec.phases), default=1)
        if any(len(group) > 1 for own in levels.values() for group in own):
            wanted = max(wanted, threads or usable_cores())
        self.threads = max(1, wanted if threads is None else min(wanted, threads))
        self._pool = Pool.get(self.threads)
        self._scratch_bytes = max((phase.scratch_bytes for k in kernels for phase in k.spec.phases), default=0)
        if self.threads > 1:
            self._pool.prepare(self._scratch_bytes)
        launches_at, arguments_at = self._make_block(levels)
        self._spans: list[Launches] = []                    # per kernel: word of its first record, number of records
        self._words_of: list[tuple[int, int]] = []          # per kernel: first words of its arguments and of its variables
        self._arguments: dict[int, list[tuple[int, int]]] = {}      # index of memory → words that hold its address, and offsets into it
        self._bound = dict(enumerate(addresses))
        self._many: dict[int, tuple[Words, Words]] = {}     # the same as arrays, for memory that many words hold the address of
        self._variables: dict[str, list[int]] = {}          # variable → words that hold its value
        self._copies: dict[int, list[int]] = {}             # word of a record → words of its copies among the launches
        self._varied: _VariedPhases | None = None           # the phases of `vary`
        self._write_kernels(arguments_at, addresses)
        self._segments: dict[Variant, tuple[Segment, ...]] = {}
        for variant, own in levels.items():
            self._segments[variant], launches_at = self._write_launches(variant, own, launches_at)

    def _entries_of(self, kernel: PreparedKernel) -> tuple[int, ...]:
        """Return the addresses of a kernel's phases. Interpreted programs are copied, so that a plan gets only the failures of its own
        runs."""
        code = kernel.loaded
        if kernel.is_host_item:
            return ()
        if isinstance(code, InterpretedProgram):
            code = self._interpreted.setdefault(code, code.copy())
        addresses = code.addresses if isinstance(code, (LoadedProgram, InterpretedProgram)) else ()
        if len(addresses) != len(kernel.spec.phases) or 0 in addresses:
            raise LaunchError(f"kernel {kernel_name(kernel)} has {len(kernel.spec.phases)} phases; its code has the addresses {addresses}")
        return addresses

    # -- the block of words -------------------------------------------------------------------------

    def _make_block(self, levels: dict[Variant, list[list[int]]]) -> tuple[int, int]:
        """Allocate the block; returns the words at which launches and arguments begin."""
        kernels = self._kernels
        launches_at = _HEADER + _LAUNCH * sum(len(k.spec.phases) for k in kernels)
        arguments_at = launches_at
        for variant, own in levels.items():
            records = sum(len(k.spec.phases) for k in variant.chosen) + len(own) + sum(len(self._together(group)) for group in own)
            arguments_at += _LAUNCH * records
        words = arguments_at + sum(len(k.spec.params) + len(k.spec.temps) + len(k.spec.variables) for k in kernels)
        block = np.zeros(words + 8, np.int64)
        skip = -address_of(block) % 64 // 8
        self._block = block[skip:]
        self._base = address_of(self._block)
        self._words = self._block.data
        self._words[POOL] = self._pool.address if self.threads > 1 else 0
        return launches_at, arguments_at

    def _write_kernels(self, arguments_at: int, addresses: Sequence[int]) -> None:
        """Write the records, arguments and variables of every kernel."""
        words, position = self._words, _HEADER
        variables_at = arguments_at + sum(len(k.spec.params) + len(k.spec.temps) for k in self._kernels)
        temporaries = temporary_numbers(self._kernels, len(addresses))
        for kernel, entries, temps in zip(self._kernels, self._entries, temporaries, strict=True):
            self._words_of.append((arguments_at, variables_at))
            self._spans.append(Launches(position, len(entries)))
            for phase, entry in zip(kernel.spec.phases, entries, strict=True):
                words[position + ENTRY] = entry
                words[position + ARGS] = self._base + 8 * arguments_at
                words[position + VARS] = self._base + 8 * variables_at
                self._write_range(position, phase.threads, 0, phase.extent)
                position += _LAUNCH
            offsets = (*(kernel.offsets or (0,) * len(kernel.buffers)), *(0,) * len(temps))
            for index, offset in zip((*kernel.buffers, *temps), offsets, strict=True):
                words[arguments_at] = addresses[index] + offset
                self._arguments.setdefault(index, []).append((arguments_at, offset))
                arguments_at += 1
            names = names_of(kernel)
            for name in kernel.spec.variables:
                self._variables.setdefault(names[name], []).append(variables_at)
                variables_at += 1

    def _write_range(self, position: int, threads: int, begin: int, end: int) -> None:
        """Write the range of iterations and the numbers of threads and chunks into the record at `position`."""
        threads, chunks = fit_launch(end - begin, threads, 0, self.threads)
        self._words[position + BEGIN] = begin
        self._words[position + END] = end
        self._words[position + THREADS] = threads
        self._words[position + CHUNKS] = chunks

    def _write_launches(self, variant: Variant, levels: list[list[int]], position: int) -> tuple[tuple[Segment, ...], int]:
        """Write the launches of a variant from `position` on. Returns its segments and the next free position."""
        segments: list[Segment] = []
        begin, count, ran = position, 0, []
        inner_at = position + _LAUNCH * (sum(len(k.spec.phases) for k in variant.chosen) + len(levels))
        for group in levels:
            ran += group
            together = self._together(group)
            for kernel in group:
                if kernel not in together:
                    position = self._copy_phases(kernel, position)
            if together:
                position = self._write_group(together, position, inner_at)
                inner_at += _LAUNCH * len(together)
            count = (position - begin) // _LAUNCH
            items = tuple(i for i in group if self._kernels[i].is_host_item)
            if items:
                segments.append(Segment(self._launches(begin, count), items, tuple(ran)))
                begin, count, ran = position, 0, []
        if count or not segments:
            segments.append(Segment(self._launches(begin, count), (), tuple(ran)))
        return tuple(segments), inner_at

    def _launches(self, word: int, count: int) -> Launches:
        """Make the Launches of `count` records; the first one begins at `word` of the block."""
        return Launches(self._base + 8 * word, count)

    def _together(self, group: Sequence[int]) -> list[int]:
        """Return the kernels of a level that are combined into one launch."""
        return run_together(self._kernels, group, self.threads)

    def _write_group(self, kernels: Sequence[int], position: int, inner_at: int) -> int:
        """Write one launch at `position` whose iterations are kernels, each with all its phases. Returns the next free position."""
        words, base = self._words, self._base
        for n, i in enumerate(kernels):
            own = self._repeated(i)
            record = inner_at + n * _LAUNCH
            words[record + ENTRY] = self._native.run_group
            words[record + ARGS] = base + 8 * own.first
            words[record + END] = own.size
            words[record + THREADS] = words[record + CHUNKS] = 1
        words[position + ENTRY] = self._native.run_group
        words[position + ARGS] = base + 8 * inner_at
        words[position + END] = len(kernels)
        threads, chunks = fit_launch(len(kernels), self.threads, _GROUP_CHUNKS * self.threads, self.threads)
        words[position + THREADS], words[position + CHUNKS] = threads, chunks
        return position + _LAUNCH

    def _repeated(self, kernel: int) -> Launches:
        """Return the records of a kernel's phases that run at each run of the plan (word of the first one, number). The records of its
        once phases, which come first, are left out."""
        first, count = self._spans[kernel]
        once = sum(phase.once for phase in self._kernels[kernel].spec.phases)
        return Launches(first + once * _LAUNCH, count - once)

    def _copy_phases(self, kernel: int, position: int) -> int:
        """Copy the records of a kernel, without its once phases, to `position`. Returns the next free position."""
        first, count = self._repeated(kernel)
        for source in range(first, first + count * _LAUNCH, _LAUNCH):
            self._block[position:position + _LAUNCH] = self._block[source:source + _LAUNCH]
            self._copies.setdefault(source, []).append(position)
            position += _LAUNCH
        return position

    # -- the interface for plans ---------------------------------------------------------------------

    def segments(self, variant: Variant) -> tuple[Segment, ...]:
        return self._segments[variant]

    def kernel_launches(self, kernel: int) -> Launches:
        return self._launches(*self._repeated(kernel))

    def runs_of(self, kernels: Sequence[int]) -> tuple[Launches, ...]:
        return tuple(map(self.kernel_launches, kernels))

    def once_launches(self, kernel: int) -> Launches:
        first, count = self._spans[kernel]
        return self._launches(first, count - self._repeated(kernel).size)

    def wait(self) -> None:
        """Do nothing: `run` waits already."""

    def run(self, launches: Launches, times: int, wait: bool = True) -> None:
        """Run launches in one native call. An exception here comes from a signal that arrived meanwhile: the native code still runs to its
        end."""
        words = self._words
        words[RECORDS], words[COUNT] = launches
        words[REPEATS] = times
        if self.threads > 1 and not self._pool.ready:
            self._pool.prepare(self._scratch_bytes)
        if self._scratch_bytes:
            words[SCRATCH] = self._pool.caller_scratch(self._scratch_bytes)
        self._run(self._base)

    def run_timed(self, launches: Launches, times: int, cold: bool = True) -> float | None:
        self.run(launches, times)
        return None

    def take_failure(self) -> BaseException | None:
        failures = [failure for code in self._interpreted.values() if (failure := code.take_failure()) is not None]
        return failures[0] if failures else None

    def bind(self, index: int, address: int) -> None:
        if self._bound.get(index) == address:
            return
        self._bound[index] = address
        places = self._arguments.get(index, ())
        if len(places) <= _FEW_PLACES:
            for position, offset in places:
                self._words[position] = address + offset
            return
        if index not in self._many:
            positions, offsets = np.array(places).T
            self._many[index] = positions, offsets
        positions, offsets = self._many[index]
        self._block[positions] = offsets + address

    def set_variable(self, name: str, value: int) -> None:
        for position in self._variables[name]:
            self._words[position] = value

    def set_range(self, kernel: int, phase: int, begin: int, end: int) -> None:
        for position in self._records_of(kernel, phase):
            self._write_range(position, self._kernels[kernel].spec.phases[phase].threads, begin, end)

    def vary(self, phases: Sequence[tuple[int, int]]) -> None:
        records = [(number, position) for number, (k, p) in enumerate(phases) for position in self._records_of(k, p)]
        numbers, positions = np.array(records, np.int64).reshape(-1, 2).T
        self._varied = _VariedPhases([self._kernels[k].spec.phases[p].threads for k, p in phases],
                                     positions[:, None] + np.array([BEGIN, END, THREADS, CHUNKS]), numbers)

    def at_extents(self, extents: tuple[int, ...]) -> Callable[[], None]:
        assert self._varied is not None, "the phases are given by vary"
        threads, words, numbers = self._varied
        rows = [(0, n, *fit_launch(n, wanted, 0, self.threads)) for n, wanted in zip(extents, threads, strict=True)]
        return partial(self._block.__setitem__, words, np.array(rows, np.int64)[numbers])

    def _records_of(self, kernel: int, phase: int) -> tuple[int, ...]:
        """Return the words at which the records of a phase begin."""
        first = self._spans[kernel].first + phase * _LAUNCH
        return first, *self._copies.get(first, ())

    def temporaries(self, kernel: int) -> list[int]:
        """Return the addresses of a kernel's temporaries, which it has as long as the plan lives."""
        first = self._words_of[kernel][0] + len(self._kernels[kernel].buffers)
        return self._words[first:first + len(self._kernels[kernel].spec.temps)].tolist()

    def arguments(self, kernel: int) -> tuple[list[int], list[int]]:
        k = self._kernels[kernel]
        arguments_at, variables_at = self._words_of[kernel]
        return (self._words[arguments_at:arguments_at + len(k.buffers)].tolist(),
                self._words[variables_at:variables_at + len(k.variables)].tolist())
