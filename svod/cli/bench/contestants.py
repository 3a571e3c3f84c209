"""svod in its own benchmarks: each case is captured like a function under `svod.jit`.

    heuristic   the heuristic's chains, without a database
    tuned       the chains of the database; with a beam, kernels that it lacks are searched first
"""
from __future__ import annotations

import time
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np

from svod import jit, scope
from svod.bench.peers import Array, PreparedPeer
from svod.bench.results import KernelInfo
from svod.bench.suites.cases import Case
from svod.compile.plan.execution_plan import ExecutionPlan
from svod.config import NONE, BeamConfig, PrepareConfig
from svod.core.cost.op_count import Work
from svod.core.graph.buffer import bfloat16_bits_to_float32
from svod.tensor import Tensor
from svod.tune.at_prepare import begin_budget, searches_interrupted, seconds_searched
from svod.tune.search.budget import MODEL_SECONDS


class SvodContestant:
    """svod under one configuration. `name` is heuristic or tuned."""

    outputs = "preallocated"

    def __init__(self, name: str, config: PrepareConfig) -> None:
        from svod import __version__

        self.name, self.config, self.version = name, config, __version__

    def prepare(self, case: Case, operands: Sequence[Array]) -> PreparedPeer:
        before, interrupted = seconds_searched(), searches_interrupted()
        begin_budget()
        prepared = self._prepare(self._config_for(case), case, operands)
        if searches_interrupted() > interrupted:
            raise KeyboardInterrupt         # Ctrl-C during a search also ends the benchmarks
        searched = None if self.config.beam is None else seconds_searched() - before
        return replace(prepared, search_seconds=searched, again=partial(self._prepare, replace(self.config, beam=None)))

    def _prepare(self, config: PrepareConfig, case: Case, operands: Sequence[Array]) -> PreparedPeer:
        tensors = [_tensor(a, o.dtype) for a, o in zip(operands, case.operands, strict=True)]
        given = [t for t, o in zip(tensors, case.operands, strict=True) if not o.weight]

        def expression(*inputs: Tensor) -> Any:
            waiting = iter(inputs)
            with nullcontext() if case.op == "model" else scope(case.name):     # a model has layers of its own
                return case.build(*(t if o.weight else next(waiting) for t, o in zip(tensors, case.operands, strict=True)))
        captured = jit(expression, config=config)
        start = time.perf_counter()
        result = captured(*given)
        seconds = time.perf_counter() - start
        plan = captured.plans[0]
        kernels = describe(plan)
        return PreparedPeer(plan.repeat, lambda: np.asarray(result.numpy()), True, identity=tuple((k.key, k.chain) for k in kernels),
                            kernels=kernels, prepare_seconds=seconds)

    def _config_for(self, case: Case) -> PrepareConfig:
        """A budget for each case: BEAM_KERNEL_BUDGET, or ten minutes for a model."""
        beam = self.config.beam
        if beam is None:
            return self.config
        seconds = MODEL_SECONDS if case.op == "model" else beam.kernel_budget
        return replace(self.config, beam=replace(beam, budget=seconds))


def svod_contestants(mode: str, beam: int | None, *, fresh: bool = False, db: str | None = None,
                     config: PrepareConfig | None = None) -> list[SvodContestant]:
    """The contestants of a run. `mode` is heuristic, db-only or beam, with the width `beam`. `fresh` also searches known kernels."""
    base = replace(config, beam=None, capture=None) if config is not None else PrepareConfig.from_env(beam=None, capture=None)
    out = [SvodContestant("heuristic", replace(base, db=NONE))]
    if mode != "heuristic":
        searched = None
        if mode == "beam":
            searched = BeamConfig.from_env(width=beam or BeamConfig().width, ignore_cache=fresh)
        out.append(SvodContestant("tuned", replace(base, beam=searched, db=db if db is not None else base.db)))
    return out


def describe(plan: ExecutionPlan) -> tuple[KernelInfo, ...]:
    """The kernels of a plan in the form of the results."""
    out = []
    for k in plan.kernels:
        e = k.estimate if isinstance(k.estimate, Work) else None
        out.append(KernelInfo(k.key, k.name, k.origin, k.opts, k.opts_source, k.why, None if e is None else e.flops,
                              None if e is None else e.bytes_moved))
    return tuple(out)


def _tensor(array: Array, dtype: str) -> Tensor:
    """A realised tensor, over the array's memory unless it is bfloat16."""
    tensor = Tensor(bfloat16_bits_to_float32(array), "bfloat16") if dtype == "bfloat16" else Tensor(array)
    return tensor.realize()
