"""The first step of svod-tune: get the plans to tune, by running the script or reading a capture."""
from __future__ import annotations

import shlex
import sys
from dataclasses import dataclass

from svod.cli import EXIT_INTERRUPTED, EXIT_USAGE
from svod.cli.installation import program
from svod.cli.tune.next_steps import why_no_graph
from svod.cli.tune.options import TuneOptions
from svod.cli.tune.script import ScriptEnd, run_script
from svod.cli.tune.setting import EXIT_DAMAGED, EXIT_NO_KERNEL, EXIT_OK, EXIT_SCRIPT, Setting
from svod.cli.tune.survey import Foresight
from svod.cli.tune.waiting import say
from svod.cli.tune.workers import Workers
from svod.compile.backend import device_named
from svod.core.machine.target import HOST
from svod.errors import FileError
from svod.system.process.directories import temporary_folder
from svod.system.quantities import count
from svod.tune import capture
from svod.tune.capture import Capture, News

MAX_PROBLEMS = 3            # most faults of a capture that are reported one by one


@dataclass(frozen=True)
class CapturedPlans:
    """The plans to tune. `script`: the end of the script that prepared them; None if a capture was read."""

    content: Capture
    script: ScriptEnd | None

    @property
    def status(self) -> int:
        """The exit status that a successful search ends with: EXIT_OK, or another one if the capture is incomplete."""
        if self.script is not None:
            return EXIT_SCRIPT if self.script.failure else EXIT_OK
        return EXIT_DAMAGED if self.content.problems else EXIT_OK

    def say_problems(self) -> None:
        problems = self.content.problems
        for problem in problems[:MAX_PROBLEMS]:
            say(f"svod-tune: skipped in the capture: {problem}")
        if len(problems) > MAX_PROBLEMS:
            say(f"svod-tune: skipped in the capture: {len(problems) - MAX_PROBLEMS} more lines")
        if self.script is None and problems and self.content.plans:
            say("svod-tune: the capture is damaged; tuning what can be read of it")

    def say_failure(self, options: TuneOptions) -> None:
        """Say how a script failed after it had prepared kernels."""
        if self.script is not None and self.script.failure:
            say(f"svod-tune: {options.subject} {self.script.failure}; "
                f"tuning the {count(len(self.content.kernels), 'kernel')} it had prepared by then")

    def end_without_plans(self, options: TuneOptions) -> int:
        """Say why there is nothing to tune. Returns the exit status."""
        if options.is_onnx and self.script is not None and self.script.why == "failed" and self.script.status == EXIT_USAGE:
            return EXIT_USAGE       # an ONNX file, or an option for it, is invalid: `svod.onnx.run` has printed the error
        say(f"svod-tune: {options.subject} {self._why_nothing(options)}")
        return EXIT_INTERRUPTED if self.script is not None and self.script.why == "interrupted" else EXIT_NO_KERNEL

    def _why_nothing(self, options: TuneOptions) -> str:
        if self.script is None:
            return f"holds no plan{' that can be used' * bool(self.status)}; capture a script that prepares or realizes a Tensor"
        if self.script.failure:
            return f"{self.script.failure} before it prepared a kernel; there is nothing to tune"
        if self.script.why != "finished":
            return "had prepared no kernel by then; there is nothing to tune"
        if options.runs_torch or options.imports_torch:
            return f"prepared no kernel; there is nothing to tune ({why_no_graph(options)})"
        return "prepared no kernel; there is nothing to tune (kernels are captured when a svod Tensor is realized or prepared)"

    def keep(self, path: str) -> bool:
        """Write the capture to a file. Returns False if it cannot be written."""
        try:
            capture.write_capture(path, self.content)
        except FileError as e:
            say(f"svod-tune: the capture is not kept: {e}")
            return False
        say(f"svod-tune: the capture is kept in {path}; tune it with {program('svod-tune')} --from {shlex.quote(path)}")
        return True


def take_capture(setting: Setting, workers: Workers) -> CapturedPlans:
    """Run the script, or read the capture. The workers are started while the script runs, as soon as it has prepared kernels worth a
    search."""
    options = setting.options
    if options.source is not None:
        return CapturedPlans(capture.read_capture(options.source), None)
    device = HOST if options.compile_only else setting.config.device or HOST
    target = device_named(device).backend.target(setting.config.threads)
    foresight = Foresight(setting.db, target.allowing(*setting.allowed), setting.beam)

    def meet(news: News) -> None:
        if not workers.have_begun and not options.dry_run and not options.compile_only and foresight.needs_search(news):
            workers.start()
    with temporary_folder("svod-capture-") as directory:
        script = run_script([*options.started, *options.asked], directory, capture_for=options.capture_for, first=options.budget / 2,
                            share=options.budget / 2, on_news=meet, device=HOST if options.compile_only else options.device,
                            numerics=options.numerics,
                            kernels_of=(options.device or setting.config.device) if options.compile_only else None,
                            stdout=sys.stderr if options.json_path == "-" else None)
        for line in script.words(options.subject):
            say(f"svod-tune: {line}")
        return CapturedPlans(capture.read_capture(str(directory)), script)
