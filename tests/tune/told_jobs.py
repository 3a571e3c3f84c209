"""Jobs of a search whose times come from a table (`told_measurer.py`). Lowering, compiling and faults are real: an item may name one of
`fault_jobs.FAULTS`, which the worker then commits."""
from __future__ import annotations

import time
from typing import Any

from svod.tune.measure.context import KernelContext, kernel_context
from svod.tune.measure.measurer import Built
from svod.tune.measure.work import (  # noqa: F401 - jobs of this module as well
    compile_candidate,
    confirm_candidates,
    confirm_candidates_setup,
    lower_candidate,
    lower_candidate_setup,
    machine_facts,
    race_candidates,
    race_candidates_setup,
    sample_candidate,
    sample_candidate_setup,
    screen_candidate,
    verify_candidate,
    verify_candidate_setup,
)
from svod.tune.workers.child import step_limit
from tests.tune.fault_jobs import FAULTS

compile_candidate_setup = compile_or_fail_setup = screen_candidate_setup = screen_or_fail_setup = kernel_context
FIRST_RUN = 0.1         # seconds after which a first run that hangs is ended, as in a search


def commit(fault: str) -> None:
    if fault == "spin native":
        with step_limit(FIRST_RUN):
            FAULTS[fault]()
    elif fault:
        FAULTS[fault]()


def compile_or_fail(item: tuple[str, Any, bool], context: KernelContext) -> Built:
    """Commit the item's fault, if it names one, then compile its chain. A fault that hangs ends at the deadline."""
    fault, chain, final = item
    if fault:
        FAULTS[fault]()
    return compile_candidate((chain, final), context)


def screen_or_fail(item: tuple[str, Any], context: KernelContext) -> Any:
    """Commit the item's fault, if it names one, then really time its candidate."""
    fault, rest = item
    commit(fault)
    return screen_candidate(rest, context)


def told(item: tuple[str, Any], state: None) -> Any:
    """Commit the item's fault, if it names one, then return the value from the table."""
    fault, value = item
    commit(fault)
    return value


def compile_slowly(item: tuple[float, int, str], context: KernelContext) -> Built:
    """A stand-in for a compiler, which takes a given number of seconds and returns a given number of bytes for a LINEAR."""
    seconds, size, linear = item
    time.sleep(seconds)
    return Built(bytes(size), (), None, linear, seconds, False)


compile_slowly_setup = kernel_context
