"""A launch queue that stores launches as lists of (kernel, phase): the common base of the queues of devices with their own memory."""
from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

from svod.compile.plan.plan_parts import Launches, PreparedKernel, Segment, Variant, levels_of, names_of, temporary_numbers


class LaunchRecords:
    """The launches of a plan, in the order of its levels, and their arguments. A subclass runs them.

    `changed(kernel)` is called when the arguments of a kernel change."""

    threads, may_fail = 1, False

    def __init__(self, kernels: Sequence[PreparedKernel], variants: Sequence[Variant], addresses: Sequence[int]) -> None:
        self.kernels, self.addresses = kernels, list(addresses)
        self.temps = temporary_numbers(kernels, len(addresses))
        self.values: dict[str, int] = {}
        self.ranges = {(k, p): (0, phase.extent) for k, kernel in enumerate(kernels) for p, phase in enumerate(kernel.spec.phases)}
        self.recorded: list[tuple[tuple[int, int], ...]] = []       # (kernel, phase) of every list of launches
        self._lists: dict[tuple[tuple[int, int], ...], Launches] = {}
        self._varied: tuple[tuple[int, int], ...] = ()              # the phases of `vary`
        self._users: dict[int, list[int]] = {}                      # index of a buffer or temporary → kernels that use it
        self._named: dict[str, list[int]] = {}                      # variable → kernels that have it
        for k, kernel in enumerate(kernels):
            for index in {*kernel.buffers, *self.temps[k]}:
                self._users.setdefault(index, []).append(k)
            for name in set(names_of(kernel).values()):
                self._named.setdefault(name, []).append(k)
        self._of_variant = {v: self._segments_of(v) for v in variants}

    def wait(self) -> None:
        """Do nothing: `run` waits already."""

    def changed(self, kernel: int) -> None:
        """Hook for subclasses, called when the arguments, variables or ranges of a kernel have changed."""

    def _record(self, kernels: Sequence[int], once: bool = False) -> Launches:
        phases = tuple([(k, p) for k in kernels for p, phase in enumerate(self.kernels[k].spec.phases) if phase.once == once])
        if phases not in self._lists:
            self._lists[phases] = Launches(len(self.recorded), len(phases))
            self.recorded.append(phases)
        return self._lists[phases]

    def _segments_of(self, variant: Variant) -> tuple[Segment, ...]:
        found, waiting = [], []
        for group in levels_of(variant.chosen):
            numbers = [variant.kernels[i] for i in group]
            waiting += numbers
            items = tuple(k for k in numbers if self.kernels[k].is_host_item)
            if items:
                found.append(Segment(self._record([k for k in waiting if k not in items]), items, tuple(waiting)))
                waiting = []
        if waiting or not found:
            found.append(Segment(self._record(waiting), (), tuple(waiting)))
        return tuple(found)

    def segments(self, variant: Variant) -> tuple[Segment, ...]:
        return self._of_variant[variant]

    def kernel_launches(self, kernel: int) -> Launches:
        return self._record([kernel])

    def runs_of(self, kernels: Sequence[int]) -> tuple[Launches, ...]:
        return (self._record(kernels),)

    def once_launches(self, kernel: int) -> Launches:
        return self._record([kernel], once=True)

    def take_failure(self) -> BaseException | None:
        return None

    def bind(self, index: int, address: int) -> None:
        if self.addresses[index] != address:
            self.addresses[index] = address
            for k in self._users.get(index, ()):
                self.changed(k)

    def set_variable(self, name: str, value: int) -> None:
        if self.values.get(name) != value:
            self.values[name] = value
            for k in self._named.get(name, ()):
                self.changed(k)

    def set_range(self, kernel: int, phase: int, begin: int, end: int) -> None:
        if self.ranges[kernel, phase] != (begin, end):
            self.ranges[kernel, phase] = begin, end
            self.changed(kernel)

    def vary(self, phases: Sequence[tuple[int, int]]) -> None:
        self._varied = tuple(phases)

    def at_extents(self, extents: tuple[int, ...]) -> Callable[[], None]:
        return partial(self._set_extents, extents)

    def _set_extents(self, extents: tuple[int, ...]) -> None:
        for (kernel, phase), extent in zip(self._varied, extents, strict=True):
            self.set_range(kernel, phase, 0, extent)

    def arguments(self, kernel: int) -> tuple[list[int], list[int]]:
        k = self.kernels[kernel]
        offsets = k.offsets or (0,) * len(k.buffers)
        return ([self.addresses[i] + offset for i, offset in zip(k.buffers, offsets, strict=True)],
                [self.values.get(v.name, 0) for v in k.variables])

    def program_values(self, kernel: int) -> dict[str, int]:
        """Return the variables of a kernel's program with their current values."""
        names = names_of(self.kernels[kernel])
        return {name: self.values.get(names[name], 0) for name in self.kernels[kernel].spec.variables}
