"""The ceilings of this machine, with which svod-tune compares kernels: from the cache, or measured once."""
from __future__ import annotations

from collections.abc import Sequence

from svod import config
from svod.bench.roofline import Ceilings, cached_ceilings
from svod.cli.tune.report import KernelReport
from svod.cli.tune.setting import CommandClock
from svod.cli.tune.survey import rate_of
from svod.cli.tune.waiting import say
from svod.core.machine.target import Target
from svod.errors import SvodError

ABOVE_CEILING = 1.05        # a kernel that exceeds its ceiling by more than this factor shows that the ceiling is wrong


class MachineCeilings:
    """The machine's ceilings. They are measured quickly at most once, and once more if that measurement cannot be right."""

    def __init__(self, clock: CommandClock) -> None:
        self._clock = clock
        self._were_measured = False
        self._known: Ceilings | None = None

    def of(self, target: Target, *, refresh: bool = False) -> Ceilings | None:
        """The ceilings of this machine for a target; None where they cannot be measured."""
        if (refresh or not self._were_measured) and self._clock.left_for_measuring > 0.0:
            self._were_measured = True
            try:
                self._known = cached_ceilings(config.data_dir() / "ceilings.json", target, quick=True, refresh=refresh)
            except (SvodError, OSError, MemoryError) as e:
                say(f"svod-tune: what this machine can do at best was not measured: {e}")
        return self._known

    def over(self, outcomes: Sequence[KernelReport], target: Target) -> Ceilings | None:
        """The ceilings with which kernels are compared. They are measured again if the machine was busy, or if a kernel exceeds ceilings
        that were measured quickly."""
        ceilings = self.of(target)
        shares = [rate_of(o.row, o.tuned, target, ceilings).share for o in outcomes if o.tuned]
        exceeded = max((s for s in shares if s is not None), default=0.0) > ABOVE_CEILING
        if ceilings is None or (ceilings.busy is None and not (ceilings.quick and exceeded)):
            return ceilings
        return self.of(target, refresh=True)
