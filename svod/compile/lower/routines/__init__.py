"""Routines (`svod.core.graph.routine`) as programs: loops written down in LINEAR, one file per kind."""
from __future__ import annotations

from svod.compile.lower.program import Program
from svod.compile.lower.routines.scan import lower_scan
from svod.compile.lower.routines.scatter import lower_scatter
from svod.compile.lower.routines.sort import lower_argsort, lower_topk
from svod.core.kernel.kernel import Kernel
from svod.core.machine.target import Target

_LOWER = {"SCAN": lower_scan, "SCATTER": lower_scatter, "ARGSORT": lower_argsort, "TOPK": lower_topk}


def lower_routine(kernel: Kernel, target: Target) -> Program:
    """The Program of a kernel that is a routine."""
    assert kernel.routine is not None
    return _LOWER[kernel.routine.arg[0]](kernel.routine, target)
