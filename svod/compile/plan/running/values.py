"""The values of a plan's variables: checks them, and sets them and the launch sizes that depend on them in the queues."""
from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from svod.compile.backend import LaunchQueue
from svod.compile.plan.plan_parts import PreparedKernel, check_launches, names_of, ranges_of, variables_of
from svod.compile.plan.running.devices import PlanDevices
from svod.core.ir.launch import ONCE, check_bounds
from svod.errors import LaunchError

MOST_FITS = 2048        # most combinations of values whose numbers of iterations are kept: batches of 1–8 by lengths of 1–256


class _Fit(NamedTuple):
    """The numbers of iterations of all phases that depend on variables, and functions that set them in the queues."""

    extents: tuple[int, ...]
    setters: tuple[Callable[[], None], ...]


class PlanValues:
    """The values of variables, which stay until they are set again. `bounds`: the bounds of the variables that have them. `unset`: the
    variables without a value."""

    def __init__(self, kernels: Sequence[PreparedKernel], devices: PlanDevices) -> None:
        self.bounds = variables_of(kernels)
        self._devices = devices
        self._values: dict[str, int | None] = {name: None for k in kernels for name in names_of(k).values()}
        self.unset = set(self._values)
        # kernels whose launches are impossible for some values
        self._over_positions = tuple(k for k in kernels if k.spec.launch != ONCE)
        self._ranges = ranges_of(kernels)
        self._sizes = tuple(dict.fromkeys(name for r in self._ranges for name in r.names.values()))      # the variables in `_ranges`
        self._queues = self._vary_queues()
        self._extents: tuple[int, ...] = ()     # the numbers of iterations in the queues, as in `_ranges`; empty if they are not known
        self._fits: OrderedDict[tuple[int | None, ...], _Fit] = OrderedDict()       # values of `_sizes` → their fit, the last used one last
        self._is_sliced = False             # whether a phase computes only part of its iterations

    def known(self) -> dict[str, int]:
        """Return the variables that have a value, with their values."""
        return {name: value for name, value in self._values.items() if value is not None and name not in self.unset}

    def set(self, values: Mapping[str, int]) -> bool:
        """Set variables. Returns whether a value changed. Raises LaunchError for an unknown name, and for a value out of bounds."""
        own, again = self._values, self._is_sliced or self.unset
        new = {}
        for name, value in values.items():
            if again or own.get(name) != value:
                new[name] = number = value if type(value) is int and name in own else self._checked(name, value, values)
                limits = self.bounds.get(name)
                if limits is not None and not limits.min <= number <= limits.max:
                    check_bounds(name, number, limits.min, limits.max)
        if not new:
            return False
        if self._over_positions:
            check_launches(self._over_positions, {**self.known(), **new})
        for name, value in new.items():
            for queue in self._devices.queues.values():
                queue.set_variable(name, value)
            own[name] = value
        if self.unset:
            self.unset -= new.keys()
        self._is_sliced = False
        if self._ranges:
            self._fit_launches()
        return True

    def _checked(self, name: str, value: Any, given: Iterable[str]) -> int:
        """Return the value of a variable as int. Raises LaunchError for an unknown name in `given`, and for a value that is not an
        integer."""
        unknown = sorted(set(given) - set(self._values))
        if unknown:
            known = ", ".join(sorted(self._values)) or "none"
            raise LaunchError(f"variables {', '.join(unknown)} were given; the plan has {known}")
        if not isinstance(value, (int, np.integer)):
            raise LaunchError(f"variable {name}={value} is outside the integers")
        return int(value)

    def _vary_queues(self) -> list[tuple[LaunchQueue, list[int]]]:
        """Declare in each queue the phases whose numbers of iterations depend on variables. Returns the queues that have some, with the
        positions of these numbers in `_ranges`."""
        found = []
        for queue in self._devices.queues.values():
            own = [(i, place) for i, r in enumerate(self._ranges) for place in r.places if self._devices.queue_of(place[0]) is queue]
            if own:
                queue.vary([place for _, place in own])
                found.append((queue, [i for i, _ in own]))
        return found

    def _fit_launches(self) -> None:
        """Set the numbers of iterations if they differ from those in the queues."""
        fit = self._fit() if self.unset.isdisjoint(self._sizes) else self._new_fit()
        if fit.extents != self._extents:
            self._extents = fit.extents
            for set_extents in fit.setters:
                set_extents()

    def _fit(self) -> _Fit:
        """Return the numbers of iterations at the present values, which are all set, from those of earlier values if they are there."""
        present = tuple([self._values[name] for name in self._sizes])
        fit = self._fits.get(present)
        if fit is None:
            fit = self._fits[present] = self._new_fit()
            if len(self._fits) > MOST_FITS:
                self._fits.popitem(last=False)
        else:
            self._fits.move_to_end(present)
        return fit

    def _new_fit(self) -> _Fit:
        """Return the numbers of iterations at the present values; of a phase that depends on an unset variable, the largest."""
        values = self.known()
        extents = tuple([phase.extent_at({name: values[known] for name, known in names.items()}) if self.unset.isdisjoint(names.values())
                         else phase.extent for phase, names, _ in self._ranges])
        return _Fit(extents, tuple(queue.at_extents(tuple([extents[i] for i in numbers])) for queue, numbers in self._queues))

    def slice(self, number: int, phase: int, begin: int, end: int) -> None:
        """Restrict a phase of a kernel to iterations begin ≤ i < end, until variables are set again."""
        self._is_sliced = True
        self._extents = ()
        self._devices.queue_of(number).set_range(number, phase, begin, end)
