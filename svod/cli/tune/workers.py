"""The workers of svod-tune: which are started, when, and how long they are waited for."""
from __future__ import annotations

import signal
from collections.abc import Callable
from types import FrameType

from svod.cli.tune.options import TuneOptions
from svod.cli.tune.setting import Clock, Setting
from svod.cli.tune.waiting import say, waiting
from svod.core.machine.target import HOST
from svod.system.process.signals import handle
from svod.tune.workers.executor import Executor
from svod.tune.workers.start import ExecutorStart

RAY_BUDGET = 20.0           # seconds: smaller budgets use local workers, unless ray:N asks for Ray


def kind_of(options: TuneOptions) -> str:
    """The workers to start: a Ray of our own takes seconds to start and to stop, too long for a small budget."""
    return "local" if options.workers == "ray" and options.address is None and options.budget < RAY_BUDGET else options.workers


class Workers:
    """The executor of a command. It starts in the background as soon as there is something to search, is up where it is first needed, and
    ends once. `description`: the executor that was ready last."""

    def __init__(self, setting: Setting, terminate: Callable[[int, FrameType | None], None]) -> None:
        self.description = ""
        self._kind, self._address, self._device = kind_of(setting.options), setting.options.address, setting.config.device or HOST
        self._clock: Clock = setting.clock
        self._terminate = terminate
        self._begun: ExecutorStart | None = None

    @property
    def have_begun(self) -> bool:
        return self._begun is not None

    def start(self) -> ExecutorStart:
        """Start them, unless that was done."""
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
        """End them, if there are any."""
        if self._begun is not None:
            with waiting("ending the workers"):
                self._begun.close()
            self._begun = None
