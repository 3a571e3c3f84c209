"""The launches of a plan on a GPU: one by one on the device's stream, or as a CUDA graph, which launches all of them by one call.

    first run with given arguments      launch, launch, launch
    second run with the same arguments  record the three launches as a graph; launch the graph
    later runs                          launch the graph

The host waits only to time or to read results (`GpuDevice`). A graph contains addresses and values, so binding an address or setting a
variable invalidates it."""
from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from typing import NamedTuple

from svod.compile.backend import COLD_RUNS
from svod.compile.cuda.code import CudaCode, Nvptx
from svod.compile.cuda.device import GpuDevice, LoadedImage
from svod.compile.cuda.driver import Driver
from svod.compile.cuda.render import block_of, dynamic_bytes, is_packed
from svod.compile.cuda.targets import GRID, WIDEST_BYTES
from svod.compile.lower.program import PhaseSpec
from svod.compile.plan.launch_records import LaunchRecords
from svod.compile.plan.plan_parts import Launches, PreparedKernel, Variant, kernel_name
from svod.errors import LaunchError


class _Launch(NamedTuple):
    """A launch with all arguments of the driver's call."""

    function: int
    grid: tuple[int, int]
    block: int
    shared: int
    arguments: tuple[int, ...]


class _LaunchGraph(NamedTuple):
    """A recorded list of launches. `state`: the queue's `_state` when it was recorded; a later state invalidates it. `handle` 0: the
    list has run once and is not recorded yet."""

    state: int
    handle: int


def grid_of(phase: PhaseSpec, count: int) -> tuple[int, int]:
    """Return the number of blocks along x and y for `count` iterations of a phase."""
    blocks = -(-count // block_of(phase)) if is_packed(phase) else count
    return (blocks, 1) if blocks <= GRID[0] else (GRID[0], -(-blocks // GRID[0]))


class CudaQueue(LaunchRecords):
    """A plan's launches on one device."""

    def __init__(self, device: GpuDevice, pair: Nvptx, kernels: Sequence[PreparedKernel], variants: Sequence[Variant],
                 addresses: Sequence[int]) -> None:
        self.device, self.pair = device, pair
        self._launches: dict[tuple[int, int], _Launch | None] = {}
        # (id of the code, whether it makes no assumptions about its arguments) → module
        self._modules: dict[tuple[int, bool], LoadedImage] = {}
        self._graphs: dict[int, _LaunchGraph] = {}
        self._names: dict[int, tuple[str, ...]] = {}        # first launch of a list → names of its kernels
        weakref.finalize(self, _free_graphs, device, self._graphs).atexit = False      # the driver frees graphs when the process ends
        self._state = 0         # number of changes of arguments so far
        super().__init__(kernels, variants, addresses)
        for kernel in kernels:
            if not kernel.is_host_item and not isinstance(kernel.loaded, CudaCode):
                raise LaunchError(f"kernel {kernel_name(kernel)} was not compiled for NVIDIA's GPUs; prepare it for the device CUDA")

    def changed(self, kernel: int) -> None:
        self._state += 1
        for p in range(len(self.kernels[kernel].spec.phases)):
            self._launches.pop((kernel, p), None)

    def wait(self) -> None:
        self.device.wait()

    def run(self, launches: Launches, times: int, wait: bool = True) -> None:
        with self.device.working(self._names_of(launches.first)) as driver:
            self._get_ready(driver, launches.first, times)
            self._do(driver, launches.first, times)
            if wait:
                self.device.wait()

    def run_timed(self, launches: Launches, times: int, cold: bool = True) -> float:
        """Do `run`, and return the seconds between device events around it. With `cold`, the events are around each run, after the L2 cache
        was filled with other data."""
        runs = min(times, COLD_RUNS) if cold else 1
        with self.device.working(self._names_of(launches.first)) as driver:
            for number in range(runs):
                self._get_ready(driver, launches.first, times)
                begin, end = self.device.clock(number)
                if cold:
                    self.device.fill_cache()
                driver.record(begin, self.device.stream)
                self._do(driver, launches.first, 1 if cold else times)
                driver.record(end, self.device.stream)
            self.device.wait()
            seconds = sum(driver.seconds_between(*self.device.clock(number)) for number in range(runs))
            return seconds * times / runs if cold and runs else seconds

    def _names_of(self, first: int) -> tuple[str, ...]:
        """Return the names of the kernels of a list of launches."""
        if first not in self._names:
            self._names[first] = tuple(dict.fromkeys(kernel_name(self.kernels[k]) for k, _ in self.recorded[first]))
        return self._names[first]

    def _do(self, driver: Driver, first: int, times: int) -> None:
        """Issue the list of launches that begins at number `first` to the stream, `times` times."""
        recorded = self.recorded[first]
        if len(recorded) > 1 and times:
            self._run_as_graph(driver, first, recorded, times)
        else:
            for _ in range(times):
                self._begin(driver, recorded)

    def _get_ready(self, driver: Driver, first: int, times: int) -> None:
        """Do the work that is needed once for given arguments, before a clock starts: load modules, and record the graph."""
        recorded = self.recorded[first]
        if not times:
            return
        for key in recorded:
            if key not in self._launches:
                self._launches[key] = self._make(*key)
        known = self._graphs.get(first)
        if known is not None and known.state == self._state and not known.handle:
            self._graphs[first] = self._as_graph(driver, recorded)

    def _run_as_graph(self, driver: Driver, first: int, recorded: Sequence[tuple[int, int]], times: int) -> None:
        known = self._graphs.get(first)
        if known is None or known.state != self._state:
            if known is not None and known.handle:
                driver.free_graph(known.handle)
            self._graphs[first] = known = _LaunchGraph(self._state, 0)
            self._begin(driver, recorded)
            times -= 1
            if times:
                self._graphs[first] = known = self._as_graph(driver, recorded)
        for _ in range(times):
            driver.launch_graph(known.handle, self.device.stream)

    def _as_graph(self, driver: Driver, recorded: Sequence[tuple[int, int]]) -> _LaunchGraph:
        """Record launches as a graph."""
        try:
            driver.begin_capture(self.device.stream)
            self._begin(driver, recorded)
            return _LaunchGraph(self._state, driver.end_capture(self.device.stream))
        except BaseException:       # caught after Ctrl-C, too: an unfinished recording would block the stream
            driver.abandon_capture(self.device.stream)
            raise

    def _begin(self, driver: Driver, recorded: Sequence[tuple[int, int]]) -> None:
        for key in recorded:
            launch = self._launches[key]
            if launch is not None:
                driver.launch(launch.function, launch.grid, launch.block, launch.shared, self.device.stream, launch.arguments)

    def _make(self, number: int, p: int) -> _Launch | None:
        """Make the launch of a phase of a kernel with its current arguments; None for 0 iterations."""
        kernel = self.kernels[number]
        phase, (begin, end) = kernel.spec.phases[p], self.ranges[number, p]
        if begin >= end:
            return None
        own, _ = self.arguments(number)
        addresses = [*own, *(self.addresses[t] for t in self.temps[number])]
        values = self.program_values(number)
        module = self._module(number, self._is_plain(kernel, addresses))
        shared = dynamic_bytes(phase)
        return _Launch(module.function(phase.symbol, shared), grid_of(phase, end - begin), block_of(phase), shared,
                       (*addresses, *(values[name] for name in kernel.spec.variables), begin, end))

    @staticmethod
    def _is_plain(kernel: PreparedKernel, addresses: Sequence[int]) -> bool:
        """Whether arguments are not aligned for wide accesses, or a written argument overlaps another one."""
        if any(a % WIDEST_BYTES for a in addresses):
            return True
        spans = [(a, a + size * dtype.itemsize) for a, (dtype, size) in zip(addresses, kernel.spec.params, strict=False)]
        return any(o != s and spans[o][0] < spans[s][1] and spans[s][0] < spans[o][1] for o in kernel.spec.outs for s in range(len(spans)))

    def _module(self, number: int, plain: bool) -> LoadedImage:
        code = self.kernels[number].loaded
        assert isinstance(code, CudaCode)
        key = id(code), plain
        if key not in self._modules:
            self._modules[key] = LoadedImage(self.device, self.pair.image_for(code, plain, self.device.capability[0]))
        return self._modules[key]


def _free_graphs(device: GpuDevice, graphs: dict[int, _LaunchGraph]) -> None:
    for graph in graphs.values():
        if graph.handle:
            device.retire(device.driver.free_graph, graph.handle)


class NoDeviceQueue(LaunchRecords):
    """The launches of a plan that was only compiled. `refuse` raises an error that says so."""

    def __init__(self, refuse: Callable[[], None], kernels: Sequence[PreparedKernel], variants: Sequence[Variant],
                 addresses: Sequence[int]) -> None:
        self.refuse = refuse
        super().__init__(kernels, variants, addresses)

    def once_launches(self, kernel: int) -> Launches:
        return Launches(0, 0)

    def run_timed(self, launches: Launches, times: int, cold: bool = True) -> None:
        self.run(launches, times)

    def run(self, launches: Launches, times: int, wait: bool = True) -> None:
        self.refuse()
