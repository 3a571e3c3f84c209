"""Lowering: a Scheduler state becomes a Program of phases in LINEAR, emitted directly.

There is no expanded graph that is simplified back. Each stage's loops are opened in the state's order; UPCAST and UNROLL
positions are expanded while emitting, a value per distinct position of the axes it depends on; every address is (pointer, index at
its loop level, constant).

Example, `UPCAST(o0, 16)` on y[i] = x[i] + 1 over 100 positions becomes

    LOOP b in begin…end (7 iterations)        # ceil(100/16)
      i = MIN(b*16, 84)                       # the last tile is moved back, no mask
      STORE y[i:i+16] = LOAD x[i:i+16] + 1

Extents that an amount does not divide: an output axis moves its last tile back (recomputing a few positions) where tiles are contiguous and
the kernel does not read what it writes, else positions are guarded; a reduce axis runs its remainder as a second, shorter copy of the body.

Extents that depend on variables: loops end where the variables say. Where an iteration covers several positions the body is there twice,
for iterations that are wholly inside, and, for what those leave, in smaller steps (`svod.core.tree.tails`): single rows, vectors under a
mask, half tiles of accumulators. A last tile of rows is moved back where there are rows enough for a whole one.

    UPCAST(o0, 64), n positions   →   LOOP i in 0…n-63 step 64: STORE y[i:i+64];   LOOP i in …n step 16: STORE y[i:i+16] if i+lane < n
"""
from __future__ import annotations

import sys

from svod.compile.lower.emit.facts import ProgramFacts
from svod.compile.lower.emit.phase import PhaseEmitter
from svod.compile.lower.program import Instruction, PhaseSpec, Program, derive_spec
from svod.core.kernel.scheduler import Scheduler


def lower(state: Scheduler, most: int = sys.maxsize) -> Program:
    """The Program of a state. Raises KernelOptError when the opts do not go together, and ProgramTooLong as soon as it is certain that the
    program has more than `most` instructions."""
    facts = ProgramFacts(state, most)
    phases: list[PhaseSpec] = []
    code: list[tuple[Instruction, ...]] = []
    for phase in facts.tree:
        spec, instructions = PhaseEmitter(facts, phase).emit()
        phases.append(PhaseSpec(f"svod_p{len(phases)}", spec.extent, spec.threads, spec.scratch, spec.once, spec.counts, spec.block,
                                spec.shared, spec.subgroup))
        code.append(instructions)
    return Program(derive_spec(state.kernel.ast, state.target, tuple(facts.temps), tuple(phases)), tuple(code))
