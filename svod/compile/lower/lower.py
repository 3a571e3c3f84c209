"""Lowering: a Scheduler state becomes a Program of phases in LINEAR, emitted directly.

No expanded graph is built and simplified. The loops of each stage are opened in the state's order. UPCAST and UNROLL positions are expanded
during emission, with one value per distinct position of the axes that it depends on. Every address is (pointer, index at its loop level,
constant).

Example, `UPCAST(o0, 16)` on y[i] = x[i] + 1 over 100 positions becomes

    LOOP b in begin…end (7 iterations)        # ceil(100/16)
      i = MIN(b*16, 84)                       # the last tile is moved back, no mask
      STORE y[i:i+16] = LOAD x[i:i+16] + 1

If a split does not divide an extent, an output axis moves its last tile back, which computes a few positions twice; this takes contiguous
tiles, and a kernel that does not read the memory that it writes; otherwise positions are guarded. A reduce axis runs its remainder as a
second, shorter copy of the body.

If an extent depends on variables, the loop ends at its value. If an iteration covers several positions, there are two bodies: one for
iterations that are entirely inside, one with smaller steps for the rest (`svod.core.tree.tails`): single rows, vectors under a mask, half
tiles of accumulators. A last tile of rows is moved back if there are enough rows for a whole tile.

    UPCAST(o0, 64), n positions   →   LOOP i in 0…n-63 step 64: STORE y[i:i+64];   LOOP i in …n step 16: STORE y[i:i+16] if i+lane < n
"""
from __future__ import annotations

import sys
from dataclasses import replace

from svod.compile.lower.emit.facts import ProgramFacts
from svod.compile.lower.emit.phase import PhaseEmitter
from svod.compile.lower.program import Instruction, PhaseSpec, Program, derive_spec
from svod.core.kernel.scheduler import Scheduler


def lower(state: Scheduler, most: int = sys.maxsize) -> Program:
    """Lower a state to a Program. Raises KernelOptError if its opts contradict each other, and ProgramTooLong as soon as the program has
    more than `most` instructions."""
    facts = ProgramFacts(state, most)
    phases: list[PhaseSpec] = []
    code: list[tuple[Instruction, ...]] = []
    for phase in facts.tree:
        spec, instructions = PhaseEmitter(facts, phase).emit()
        phases.append(replace(spec, symbol=f"svod_p{len(phases)}"))
        code.append(instructions)
    return Program(derive_spec(state.kernel.ast, state.target, tuple(facts.temps), tuple(phases)), tuple(code))
