"""The workers of svod-tune: the choice of local or Ray workers, their start in the background, and their end."""
from __future__ import annotations

import signal
from collections.abc import Callable
from types import FrameType

from svod.cli.tune.options import TuneOptions
from svod.cli.tune.setting import CommandClock, Setting
from svod.cli.tune.waiting import say, waiting
from svod.core.machine.target import HOST
from svod.system.process.signals import handle
from svod.tune.workers.executor import Executor
from svod.tune.workers.start import ExecutorStart

RAY_BUDGET = 20.0           # budgets of fewer seconds use local workers, unless ray:N asks for Ray


def kind_of(options: TuneOptions) -> str:
    """The kind of workers to start, as --workers names it. For a small budget it is "local" instead of "ray", because an embedded Ray
    takes seconds to start and to stop."""
    return "local" if options.workers == "ray" and options.address is None and options.budget < RAY_BUDGET else options.workers


class Workers:
    """The executor of a command. It is started in the background as soon as there is something to search; a method that needs it waits for
    it. `description`: the description of the executor, "" before it was ready."""

    def __init__(self, setting: Setting, terminate: Callable[[int, FrameType | None], None]) -> None:
        self.description = ""
        self._kind, self._address, self._device = kind_of(setting.options), setting.options.address, setting.config.device or HOST
        self._clock: CommandClock = setting.clock
        self._terminate = terminate
        self._begun: ExecutorStart | None = None

    @property
    def have_begun(self) -> bool:
        return self._begun is not None

    def start(self) -> ExecutorStart:
        """Start the workers in the background, unless they were started before."""
        if self._begun is None:
            self._begun = ExecutorStart(self._kind, self._address, device=self._device, say=lambda text: say(f"svod-tune: {text}"))
        return self._begun

    def up(self) -> Executor:
        """The executor, some of whose workers may still be starting. Raises TuneError."""
        executor = self.start().result(self._clock.left_for_starting)
        handle(signal.SIGTERM, self._terminate)     # replaces Ray's handler, which prints a stack
        return executor

    def ready(self) -> Executor:
        """The executor with its workers up. Raises TuneError where none starts."""
        with waiting(f"starting the workers ({self._kind})"):
            executor = self.up()
            executor.wait_until_ready(self._clock.left_for_starting)
        self.description = executor.description
        return executor

    def close(self) -> None:
        """End the workers, if they were started."""
        if self._begun is not None:
            with waiting("ending the workers"):
                self._begun.close()
            self._begun = None
