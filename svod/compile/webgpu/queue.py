"""The launch queue of WebGPU: it records the launches of a plan into command buffers and submits them. The host waits only to time or to
read results (`WebGpuDevice`).

    run([k0 p0, k0 p1, k1 p0], 3)    one pass of nine dispatches, one submission

wgpu inserts a barrier between two dispatches if one writes memory that the other uses. A bind group is kept until an address changes. One
small buffer has the numbers of all launches: the bounds of their iterations, the values of variables, and the offsets of arguments in their
bindings. Only numbers that change are written again.
"""
from __future__ import annotations

import struct
import time
from collections.abc import Sequence
from typing import Any

from svod.compile.backend import COLD_RUNS
from svod.compile.plan.launch_records import LaunchRecords
from svod.compile.plan.plan_parts import Launches, PreparedKernel, Variant, kernel_name
from svod.compile.webgpu.adapter import package
from svod.compile.webgpu.code import WebGpuCode
from svod.compile.webgpu.device import BUFFER_UNIT_BYTES, WebGpuDevice
from svod.compile.webgpu.render import OTHER, groups_of, launch_bytes
from svod.errors import LaunchError

MOST_DISPATCHES = 256       # maximum number of dispatches per submission: drivers abort work that blocks a device for too long
MOST_TIMED_PASSES = 256            # maximum number of passes of a run that the device times
SLOT = 256                  # bytes between the launches' numbers: offsets of uniform buffers are multiples of it

Launch = tuple[int, int]    # (kernel, phase)


class PassClock:
    """Times passes on the device, without the time between them. If there are more than `MOST_TIMED_PASSES` passes, only the first ones are
    timed, and their time is scaled."""

    def __init__(self, made: WebGpuDevice) -> None:
        self.device, self.passes = made, 0
        self.queries = made.wgpu.create_query_set(type="timestamp", count=2 * MOST_TIMED_PASSES)

    def next_pass(self) -> dict[str, Any]:
        """Return the arguments that time the next pass."""
        n, self.passes = self.passes, self.passes + 1
        return {"timestamp_writes": {"query_set": self.queries, "beginning_of_pass_write_index": 2 * n,
                                     "end_of_pass_write_index": 2 * n + 1}} if n < MOST_TIMED_PASSES else {}

    def seconds(self) -> float | None:
        """Return the total seconds of all passes; None if the device gave no times."""
        timed, made, usage = min(self.passes, MOST_TIMED_PASSES), self.device, package().BufferUsage
        if not timed:
            return 0.0
        buffer = made.wgpu.create_buffer(size=16 * timed, usage=usage.QUERY_RESOLVE | usage.COPY_SRC)
        encoder = made.wgpu.create_command_encoder()
        encoder.resolve_query_set(self.queries, 0, 2 * timed, buffer, 0)
        made.queue.submit([encoder.finish()])
        ticks = struct.unpack(f"<{2 * timed}Q", made.queue.read_buffer(buffer))
        spent = sum(end - begin for begin, end in zip(ticks[::2], ticks[1::2], strict=True))
        return spent * made.tick * self.passes / timed if spent > 0 else None


class WebGpuQueue(LaunchRecords):
    """The queue of one plan on one device. Only one thread may call it at a time."""

    def __init__(self, device: WebGpuDevice, kernels: Sequence[PreparedKernel], variants: Sequence[Variant],
                 addresses: Sequence[int]) -> None:
        super().__init__(kernels, variants, addresses)
        self.device = device
        self.numbers = {launch: n for n, launch in enumerate(self.ranges)}
        self._groups: dict[Launch, tuple[Any, Any]] = {}    # launch → (pipeline, bind group)
        usage = package().BufferUsage
        self._slot = max([SLOT, *[-(-launch_bytes(k.spec) // SLOT) * SLOT for k in kernels]])
        self._end = max(self._slot, self._slot * len(self.numbers))     # first byte after the launches' numbers, which nothing reads
        with self.device.trying("a plan was made"):
            self._uniforms = self.device.wgpu.create_buffer(size=self._end + BUFFER_UNIT_BYTES, usage=usage.UNIFORM | usage.COPY_DST)
        self._stale = set(self.ranges)      # launches whose numbers must be written again

    def changed(self, kernel: int) -> None:
        for launch in [(kernel, p) for p in range(len(self.kernels[kernel].spec.phases))]:
            self._groups.pop(launch, None)
            self._stale.add(launch)

    # -- running ----------------------------------------------------------------------------------
    def wait(self) -> None:
        self.device.wait()

    def run(self, launches: Launches, times: int, wait: bool = True) -> None:
        self._submit(self.recorded[launches.first], times, wait=wait)

    def run_timed(self, launches: Launches, times: int, cold: bool = True) -> float | None:
        """Do `run`, and return its seconds (`LaunchQueue.run_timed`). If a device has no clock, the L2 cache is filled only once, before
        the first run, and the host's clock starts afterwards."""
        phases = self.recorded[launches.first]
        with self.device.trying("runs were timed"):
            if self.device.has_timestamps:
                clock, runs = PassClock(self.device), min(times, COLD_RUNS) if cold else times
                self._submit(phases, runs, clock, cold)
                seconds = clock.seconds()
                if seconds is not None:
                    return seconds * times / max(1, runs)
            elif not cold:
                self._submit(phases, times)
            if not cold:
                return None
            encoder = self.device.wgpu.create_command_encoder()
            self.device.fill_cache(encoder, self._uniforms, self._end)
            self.device.queue.submit([encoder.finish()])
            self.device.wait()
            start = time.perf_counter()
            self._submit(phases, times)
            return time.perf_counter() - start

    def _submit(self, phases: Sequence[Launch], times: int, clock: PassClock | None = None, cold: bool = False, wait: bool = True) -> None:
        """Submit launches `times` times. `cold`: fill the L2 cache with other data before each time. `wait`: whether to wait for the
        last submission."""
        made = self.device
        todo = [launch for launch in phases if self.ranges[launch][0] < self.ranges[launch][1]]
        if not todo or times < 1:
            return
        names = list(dict.fromkeys(kernel_name(self.kernels[k]) for k, _ in todo))
        with made.trying(f"{', '.join(names[:8])} ran"):
            for launch in self._stale.intersection(todo):
                self._write_numbers(launch)
            ready = [(*self._group(launch), *self._dimensions(launch)) for launch in todo]
            together = 1 if cold else min(times, max(1, MOST_DISPATCHES // len(ready)))
            for begun in range(0, times, together):
                encoder = made.wgpu.create_command_encoder()
                if cold:
                    made.fill_cache(encoder, self._uniforms, self._end)
                compute = encoder.begin_compute_pass(**({} if clock is None else clock.next_pass()))
                for pipeline, group, x, y in ready * min(together, times - begun):
                    compute.set_pipeline(pipeline)
                    compute.set_bind_group(0, group)
                    compute.dispatch_workgroups(x, y)
                compute.end()
                made.submit(encoder, names)
            if wait:
                made.wait()

    def _dimensions(self, launch: Launch) -> tuple[int, int]:
        begin, end = self.ranges[launch]
        return groups_of(end - begin, int(self.device.wgpu.limits["max-compute-workgroups-per-dimension"]))

    def _write_numbers(self, launch: Launch) -> None:
        """Write the bounds of a launch, the values of its variables, and the starts of its arguments."""
        bases = self._bases(launch)
        numbers = [*self.ranges[launch], *self.program_values(launch[0]).values()]
        numbers += [bases.get(slot, 0) for slot in range(len(self.kernels[launch[0]].spec.params))]
        numbers += [0] * (-len(numbers) % 4)
        self.device.queue.write_buffer(self._uniforms, self.numbers[launch] * self._slot, struct.pack(f"<{len(numbers)}i", *numbers))
        self._stale.discard(launch)

    def _bases(self, launch: Launch) -> dict[int, int]:
        """Return the distance in elements, by slot, from the aligned address at which an argument's binding begins to the argument's
        start, for arguments that are not aligned for bindings."""
        kernel, made = self.kernels[launch[0]], self.device
        assert isinstance(kernel.loaded, WebGpuCode)
        addresses, _ = self.arguments(launch[0])
        beyond = {n: made.find(addresses[n])[1] % made.alignment // kernel.spec.params[n][0].itemsize      # others may not be bound yet
                  for op, n in kernel.loaded.modules[launch[1]].any.bindings if op == "ARG"}               # when phases run once
        return {slot: elements for slot, elements in beyond.items() if elements}

    def _group(self, launch: Launch) -> tuple[Any, Any]:
        """Return the pipeline of a launch and its bind group."""
        group = self._groups.get(launch)
        if group is None:
            group = self._groups[launch] = self._bind_group(launch)
        return group

    def _bind_group(self, launch: Launch) -> tuple[Any, Any]:
        k, p = launch
        kernel, made = self.kernels[k], self.device
        assert isinstance(kernel.loaded, WebGpuCode)
        spec, (addresses, _) = kernel.spec, self.arguments(k)
        pipeline = kernel.loaded.pipeline(made, p, aligned=not self._bases(launch))
        entries = [self._entry(0, self._uniforms, self.numbers[launch] * self._slot, launch_bytes(spec))]
        for number, (op, n) in enumerate(pipeline.bindings):
            if op == OTHER:
                entries.append(self._entry(number + 1, pipeline.other, 0, pipeline.other.size))
                continue
            address = addresses[n] if op == "ARG" else self.addresses[self.temps[k][n]]
            nbytes = spec.params[n][1] * spec.params[n][0].itemsize if op == "ARG" else spec.temps[n]
            entries.append(self._bound(number + 1, address, nbytes, f"{'argument' if op == 'ARG' else 'temporary'} {n} of "
                                                                    f"{kernel_name(kernel)}"))
        return pipeline.wgpu, made.wgpu.create_bind_group(layout=pipeline.layout, entries=entries)

    def _bound(self, number: int, address: int, nbytes: int, what: str) -> dict[str, Any]:
        """Return the bind group entry for memory that a launch uses."""
        buffer, offset, left = self.device.find(address)
        beyond = offset % self.device.alignment
        size = max(16, min(-(-(nbytes + beyond) // 16) * 16, left + beyond))
        if size > self.device.most_bound:
            raise LaunchError(f"{what} has {nbytes} bytes; this device binds {self.device.most_bound} at a time: use smaller "
                              "tensors, or the CPU (unset SVOD_DEVICE)")
        return self._entry(number, buffer, offset - beyond, size)

    @staticmethod
    def _entry(number: int, buffer: Any, offset: int, size: int) -> dict[str, Any]:
        return {"binding": number, "resource": {"buffer": buffer, "offset": offset, "size": size}}
