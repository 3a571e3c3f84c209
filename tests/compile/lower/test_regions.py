"""The loop nest is what is emitted: the emitter derives regions with symbolic starts, the loop nest their extents."""
from __future__ import annotations

import random
from dataclasses import replace

import pytest

from svod.compile.lower.emit.stages import Stages
from svod.compile.lower.lower import lower
from svod.core.kernel.groups import BLOCK_ROLES
from svod.core.kernel.kernel import Kernel
from svod.core.kernel.loop_nest import loop_nest
from svod.core.kernel.scheduler import Scheduler
from svod.core.machine.target import Target
from svod.errors import KernelOptError
from tests.chain_runs import KERNELS
from tests.chains import group_state, random_state
from tests.compile.native import AVX2, AVX512
from tests.toy_backend.target import TOY

CHAINS = 4              # of each kernel
LEAST_EQUAL = 0.98      # of the stages inside loops: the others are those of remainders, which cover less


@pytest.mark.slow
@pytest.mark.parametrize("target", [replace(AVX512, threads=4), AVX2, TOY], ids=["avx512", "avx2", "toy"])
def test_regions_and_loops_are_those_of_the_loop_nest(target: Target, monkeypatch: pytest.MonkeyPatch) -> None:
    emitted: dict[int, list[tuple[tuple[int, ...], object]]] = {}
    open_copy, open_rows = Stages._open_copy, Stages._open_rows

    def note_copy(self, r, extents, base, layout, exact=False):     # type: ignore[no-untyped-def]
        stage = open_copy(self, r, extents, base, layout, exact)
        emitted.setdefault(r.stage.index, []).append((tuple(extents), tuple(stage.pieces)))
        return stage

    def note_rows(self, r, extents, base):      # type: ignore[no-untyped-def]
        region = tuple(extents)
        stage = open_rows(self, r, extents, base)
        emitted.setdefault(r.stage.index, []).append((region, tuple(stage.pieces)))
        return stage
    monkeypatch.setattr(Stages, "_open_copy", note_copy)
    monkeypatch.setattr(Stages, "_open_rows", note_rows)
    equal, smaller = 0, []
    for name, ast in KERNELS.items():
        kernel = Kernel(ast())
        for seed in range(CHAINS):
            rng = random.Random(f"{name} {seed}")
            state = (group_state if target.has_groups else random_state)(rng, Scheduler(kernel, target), rng.randint(1, 10))
            emitted.clear()
            try:
                lower(state)
            except KernelOptError:      # threads that do not reach what is read
                continue
            for s, ways in emitted.items():
                nest = loop_nest(state).stages[s]
                loops = tuple(tuple(p for p in own if p.role not in BLOCK_ROLES) for own in nest.axes)      # threads are not loops
                chain = f"{name}, stage {state.kernel.stages[s].name}: {[o.to_json() for o in state.applied_opts]}"
                if (nest.region, loops) in ways:
                    equal += bool(nest.around)
                    continue
                assert nest.around, chain
                assert all(e <= n for extents, _ in ways for e, n in zip(extents, nest.region, strict=True)), chain
                smaller.append(chain)
    assert equal > 40 and equal >= LEAST_EQUAL * (equal + len(smaller)), "\n".join(smaller)
