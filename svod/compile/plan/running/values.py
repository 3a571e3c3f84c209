"""The values of a plan's variables: checked, told to the queues, and the launches that depend on them."""
from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np

from svod.compile.plan.plan_parts import PreparedKernel, check_launches, names_of, ranges_of, variables_of
from svod.compile.plan.running.devices import PlanDevices
from svod.core.ir.launch import ONCE, check_bounds
from svod.errors import LaunchError


class PlanValues:
    """Variables keep a value until they are given another. `bounds`: of those that have some. `unset`: those that have no value."""

    def __init__(self, kernels: Sequence[PreparedKernel], devices: PlanDevices) -> None:
        self.bounds = variables_of(kernels)
        self._devices = devices
        self._values: dict[str, int | None] = {name: None for k in kernels for name in names_of(k).values()}
        self.unset = set(self._values)
        self._over_positions = tuple(k for k in kernels if k.spec.launch != ONCE)     # kernels whose launches values can refuse
        self._ranges = ranges_of(kernels)
        self._is_sliced = False             # a phase computes a part of its iterations

    def known(self) -> dict[str, int]:
        """The variables that have a value, and what it is."""
        return {name: value for name, value in self._values.items() if value is not None and name not in self.unset}

    def set(self, values: Mapping[str, int]) -> bool:
        """Give variables values. Returns whether one is another than before. Raises LaunchError for an unknown name and for a value that a
        variable cannot have."""
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
            self._fit_launches(new)
        return True

    def _checked(self, name: str, value: Any, given: Iterable[str]) -> int:
        """The value of a variable. Raises LaunchError for an unknown name in `given`, and for a value that is not an integer."""
        unknown = sorted(set(given) - set(self._values))
        if unknown:
            known = ", ".join(sorted(self._values)) or "none"
            raise LaunchError(f"variables {', '.join(unknown)} were given; the plan has {known}")
        if not isinstance(value, (int, np.integer)):
            raise LaunchError(f"variable {name}={value} is outside the integers")
        return int(value)

    def _fit_launches(self, changed: Iterable[str]) -> None:
        """Launches of as many iterations as the variables say."""
        for number, p, phase, names in {id(r): r for name in changed for r in self._ranges.get(name, ())}.values():
            if self.unset.isdisjoint(names.values()):
                extent = phase.extent_at({name: self._values[known] for name, known in names.items()})     # type: ignore[misc]
                self._devices.queue_of(number).set_range(number, p, 0, extent)

    def slice(self, number: int, phase: int, begin: int, end: int) -> None:
        """Let a phase of a kernel compute iterations begin ≤ i < end only, until variables are given values."""
        self._is_sliced = True
        self._devices.queue_of(number).set_range(number, phase, begin, end)
