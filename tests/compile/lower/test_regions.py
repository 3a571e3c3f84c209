"""The cost model prices the copies that are emitted: the emitter derives regions with symbolic starts, the loop nest their extents."""
from __future__ import annotations

import random
from dataclasses import replace

import pytest

from svod.compile.lower.emit.stages import Stages
from svod.compile.lower.lower import lower
from svod.core.kernel.kernel import Kernel
from svod.core.kernel.loop_nest import loop_nest
from svod.core.kernel.scheduler import Scheduler
from tests.chains import random_state
from tests.compile.native import AVX512
from tests.core.corpus import CORPUS
from tests.hand_kernels import HAND

KERNELS = {**CORPUS, **HAND}
TARGET = replace(AVX512, threads=4)
CHAINS = 4              # of each kernel
LEAST_EQUAL = 0.97      # of the copies: the others are those of remainders, which cover less


def test_regions_and_copy_loops_are_those_of_the_loop_nest(monkeypatch: pytest.MonkeyPatch) -> None:
    emitted: dict[int, list[tuple[tuple[int, ...], object]]] = {}
    open_copy = Stages._open_copy

    def note_copy(self, r, extents, base, layout, exact=False):     # type: ignore[no-untyped-def]
        stage = open_copy(self, r, extents, base, layout, exact)
        emitted.setdefault(r.stage.index, []).append((tuple(extents), tuple(stage.pieces)))
        return stage
    monkeypatch.setattr(Stages, "_open_copy", note_copy)
    equal, smaller = 0, []
    for name, ast in KERNELS.items():
        kernel = Kernel(ast())
        for seed in range(CHAINS):
            rng = random.Random(f"{name} {seed}")
            state = random_state(rng, Scheduler(kernel, TARGET), rng.randint(1, 10))
            emitted.clear()
            lower(state)
            for s, copies in emitted.items():
                nest = loop_nest(state).stages[s]
                if (nest.region, nest.axes) in copies:
                    equal += 1
                    continue
                chain = f"{name}, stage {kernel.stages[s].name}: {[o.to_json() for o in state.applied_opts]}"
                assert all(e <= n for extents, _ in copies for e, n in zip(extents, nest.region, strict=True)), chain
                smaller.append(chain)
    assert equal > 100 and equal >= LEAST_EQUAL * (equal + len(smaller)), "\n".join(smaller)
