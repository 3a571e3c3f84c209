"""Jobs of a search whose times are told (`told_measurer.py`). Lowering and compiling are real, and so are the faults: an item may name one
of `fault_jobs.FAULTS`, which the worker then commits."""
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
FIRST_RUN = 0.1         # seconds after which a first run that hangs is ended, as the search does


def commit(fault: str) -> None:
    if fault == "spin native":
        with step_limit(FIRST_RUN):
            FAULTS[fault]()
    elif fault:
        FAULTS[fault]()


def compile_or_fail(item: tuple[str, Any, bool], context: KernelContext) -> Built:
    """Compile a chain, after committing a fault. One that hangs runs into the deadline."""
    fault, chain, passes = item
    if fault:
        FAULTS[fault]()
    return compile_candidate((chain, passes), context)


def screen_or_fail(item: tuple[str, Any], context: KernelContext) -> Any:
    """Screen a candidate in earnest, after committing a fault."""
    fault, rest = item
    commit(fault)
    return screen_candidate(rest, context)


def told(item: tuple[str, Any], state: None) -> Any:
    """The value that was told, after committing a fault."""
    fault, value = item
    commit(fault)
    return value


def compile_slowly(item: tuple[float, int, str], context: KernelContext) -> Built:
    """Stands for a compiler that takes so many seconds and makes so many bytes for a LINEAR."""
    seconds, size, linear = item
    time.sleep(seconds)
    return Built(bytes(size), (), None, linear, seconds, False)


compile_slowly_setup = kernel_context
