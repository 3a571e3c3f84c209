"""The contestants of svod in its own benchmarks. Each case is captured like a function under `svod.jit`.

    heuristic   uses the heuristic's chains, without a database
    tuned       uses the chains of the database; with a beam, kernels that it lacks are searched first
"""
from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np

from svod import jit, scope
from svod.bench.peers import Array, PreparedPeer, calls
from svod.bench.profile import profile
from svod.bench.results import KernelInfo, KernelShare
from svod.bench.suites.cases import Case
from svod.bench.suites.torch_modules import Decoding, compiled
from svod.compile.backend import backend_named
from svod.compile.plan.execution_plan import ExecutionPlan
from svod.compile.plan.kernel_form import KernelForm
from svod.config import NONE, BeamConfig, PrepareConfig
from svod.core.graph.buffer import bfloat16_bits_to_float32
from svod.core.kernel.chain_text import AS_IT_IS
from svod.core.machine.target import HOST
from svod.tensor import Tensor
from svod.tune.at_prepare import begin_budget, searches_interrupted, seconds_searched
from svod.tune.search.budget import MODEL_SECONDS

EXPLAIN_SECONDS = 0.3           # seconds for which the kernels of a block are timed


class SvodContestant:
    """svod under one configuration. `name` is heuristic or tuned."""

    outputs = "preallocated"

    def __init__(self, name: str, config: PrepareConfig, budget: float | None = None) -> None:
        from svod import __version__

        self.name, self.config, self.version, self.budget = name, config, __version__, budget

    def prepare(self, case: Case, operands: Sequence[Array]) -> PreparedPeer:
        before, interrupted = seconds_searched(), searches_interrupted()
        begin_budget()
        prepared = self._prepare(self._config_for(case), case, operands)
        if searches_interrupted() > interrupted:
            raise KeyboardInterrupt         # Ctrl-C during a search also ends the benchmarks
        searched = None if self.config.beam is None else seconds_searched() - before
        return replace(prepared, search_seconds=searched, again=partial(self._prepare, replace(self.config, beam=None)))

    def _prepare(self, config: PrepareConfig, case: Case, operands: Sequence[Array]) -> PreparedPeer:
        if case.alone:
            return MODEL_PREPARERS[case.op](config, case)
        tensors = [_tensor(a, o.dtype) for a, o in zip(operands, case.operands, strict=True)]
        given = [t for t, o in zip(tensors, case.operands, strict=True) if not o.weight]

        def expression(*inputs: Tensor) -> Any:
            waiting = iter(inputs)
            with nullcontext() if case.op == "model" else scope(case.name):     # a model names its layers itself
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
        """The configuration with the search budget of a case: `budget` if it was given, else BEAM_KERNEL_BUDGET, or ten minutes for a
        model."""
        beam = self.config.beam
        if beam is None or case.alone:
            return self.config
        seconds = self.budget or (MODEL_SECONDS if case.op == "model" else beam.kernel_budget)
        return replace(self.config, beam=replace(beam, budget=seconds))


def _prepare_file(config: PrepareConfig, case: Case) -> PreparedPeer:
    """Prepare an ONNX file, which is called as its users call it: with arrays, and returning new arrays."""
    from svod.onnx import load

    start = time.perf_counter()
    model = load(case.options["source"], config=config)
    feed = case.options["draw"]([(i.name, len(i.shape or ()), i.dtype == "float32") for i in model.inputs])
    arrays = [feed[i.name] for i in model.inputs]
    last: list[Any] = []

    def run() -> None:
        result = model(*arrays)
        last[:] = result if isinstance(result, tuple) else [result]
    run()
    return PreparedPeer(calls(run), lambda: list(last), False, **_facts(model.plans, time.perf_counter() - start))


def _prepare_module(config: PrepareConfig, case: Case) -> PreparedPeer:
    """Prepare a PyTorch module, compiled by `deployed`."""
    import torch

    from svod.bench.peers.with_torch import prepared_module
    from svod.torch.functions import functions

    torch.set_num_threads(config.threads or backend_named(HOST).target().threads)
    options: dict[str, Any] = {"db": config.db, "threads": config.threads}
    if config.beam is not None:
        options |= {"beam": config.beam.width, "budget": config.beam.budget, "ignore_cache": config.beam.ignore_cache}
    prepared = prepared_module(case, partial(deployed, options=options))
    plans = [p.captured.plan for f in functions for p in f.plans if p.captured is not None]
    left = sorted({m.name for f in functions for m in f.missing} | {r for f in functions for r in f.refused.values()})
    remark = "in PyTorch: " + ", ".join(left) if left else "" if plans else "nothing is compiled: PyTorch runs it all"
    return replace(prepared, remark=remark, explain=partial(explained, plans), **_facts(plans, prepared.prepare_seconds or 0.0))


def explained(plans: Sequence[ExecutionPlan]) -> tuple[KernelShare, ...]:
    """The kernels of plans by their time, each timed alone, with the cost model's prediction for it."""
    shares = []
    for plan in plans:
        for time_of, kernel in zip(profile(plan, seconds=EXPLAIN_SECONDS).kernels, plan.kernels, strict=True):
            cost = None
            if isinstance(kernel.form, KernelForm) and kernel.form.kernel.library_kernel is None:
                cost = backend_named(kernel.form.target.device).cost(kernel.form.state)
            shares.append(KernelShare(time_of.name, kernel.chain or AS_IT_IS, f"{kernel.opts_source}; {kernel.why}".rstrip("; "),
                                      time_of.seconds, 0.0, time_of.bound, None if cost is None else cost.cycles,
                                      "" if cost is None else "\n".join(map(str, cost.parts)),
                                      "" if kernel.form is None else kernel.form.nest()))
    total = sum(s.seconds for s in shares)
    return tuple(replace(s, share=s.seconds / total if total else 0.0) for s in sorted(shares, key=lambda s: -s.seconds))


def deployed(module: Any, options: dict[str, Any]) -> Callable[..., Any]:
    """A module compiled as for deployment: by svod.torch.compile at its first call. The step of a decoding loop is compiled by
    torch.compile instead, whose guards are checked in each call. The first call raises UnsupportedError for a module that cannot be
    exported."""
    import torch

    import svod.torch

    if isinstance(module, Decoding):
        return compiled(module, backend="svod", options=options)    # type: ignore[no-any-return]
    made: list[Callable[..., Any]] = []

    def call(*args: Any, **kwargs: Any) -> Any:
        if not made:
            with torch.inference_mode(False):
                made.append(svod.torch.compile(module, *args, options=options, **kwargs))
        return made[0](*args, **kwargs)
    return call


def _facts(plans: Sequence[ExecutionPlan], seconds: float) -> dict[str, Any]:
    kernels = tuple(k for plan in plans for k in describe(plan))
    return {"kernels": kernels, "identity": tuple((k.key, k.chain) for k in kernels), "prepare_seconds": seconds}


MODEL_PREPARERS: Mapping[str, Callable[[PrepareConfig, Case], PreparedPeer]] = {"onnx": _prepare_file, "torch": _prepare_module,
                                                                               "blocks": _prepare_module}


def svod_contestants(mode: str, beam: int | None, *, fresh: bool = False, db: str | None = None,
                     config: PrepareConfig | None = None, budget: float | None = None) -> list[SvodContestant]:
    """The contestants of a run. `mode` is heuristic, db-only or beam, with the width `beam`. `fresh`: search known kernels as well.
    `budget`: seconds of search for each case; None: the defaults of `SvodContestant`."""
    base = replace(config, beam=None, capture=None) if config is not None else PrepareConfig.from_env(beam=None, capture=None)
    out = [SvodContestant("heuristic", replace(base, db=NONE))]
    if mode != "heuristic":
        searched = None
        if mode == "beam":
            searched = BeamConfig.from_env(width=beam or BeamConfig().width, ignore_cache=fresh, budget=budget or MODEL_SECONDS)
        out.append(SvodContestant("tuned", replace(base, beam=searched, db=db if db is not None else base.db), budget))
    return out


def describe(plan: ExecutionPlan) -> tuple[KernelInfo, ...]:
    """The kernels of a plan as the KernelInfo of benchmark results."""
    out = []
    for k in plan.kernels:
        e = k.work
        out.append(KernelInfo(k.key, k.name, k.origin, k.opts, k.opts_source, k.why, None if e is None else e.flops,
                              None if e is None else e.bytes_moved))
    return tuple(out)


def _tensor(array: Array, dtype: str) -> Tensor:
    """A realised tensor with the content of an array. It uses the array's memory, except for bfloat16, which is converted."""
    tensor = Tensor(bfloat16_bits_to_float32(array), "bfloat16") if dtype == "bfloat16" else Tensor(array)
    return tensor.realize()
