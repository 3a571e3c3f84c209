"""Runs a graph as a function of PyTorch tensors: chooses the plan of a call, or leaves the call to PyTorch."""
from __future__ import annotations

import logging
import threading
import time
import weakref
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch

from svod.config import PrepareConfig
from svod.errors import SharedMemoryError, SvodError, UnsupportedError
from svod.system.forksafe import remake_after_fork
from svod.torch.kept import WrittenArguments
from svod.torch.memory import is_representable
from svod.torch.plans import AtenProgram, Plan, bytes_of, make_plan
from svod.torch.settings import Settings
from svod.torch.threads import share_cores, with_threads_of_torch
from svod.torch.translate import Missing, unsupported
from svod.torch.varying.own import own_plans_of
from svod.torch.varying.sizes import VaryingSizes, form_of_argument
from svod.torch.weights import Weights
from svod.tracing.lengths import FEW

MOST_PLANS = 64             # most plans for one set of weights; the least recently used one is dropped
MOST_WEIGHTS = 64           # most sets of weights for which a graph has plans
MOST_CHANGES = 8            # changes of weights after which every run reads them as arguments
log = logging.getLogger("svod.torch")
functions: weakref.WeakSet[GraphFunction] = weakref.WeakSet()      # all live functions, for reports


class GraphFunction:
    """A function of the tensors and ints that a graph's placeholders stand for; it returns a list.

    `static`: the numbers of the arguments that are weights. `kept`: the numbers of the arguments that belong to the module and that the
    graph writes. `bound`: None, or a function that raises if one of these tensors was replaced since compilation; it is called after a
    change of weights and before a new plan, and promises that they are otherwise the same tensors in every call. `eager`: the same
    function, run by PyTorch. `check`: raises for arguments that the function was not compiled for; it is called once for each form of
    arguments."""

    def __init__(self, program: AtenProgram, static: Sequence[int], kept: Sequence[int], eager: Callable[..., Any], settings: Settings,
                 entry: str, *, bound: Callable[[], None] | None = None,
                 check: Callable[[Sequence[Any]], None] = lambda given: None) -> None:
        self.bound, self.check = bound, check
        self.program, self.eager, self.settings, self.entry = program, eager, settings, entry
        self.static = list(static) if settings.freeze else []
        self.kept = list(kept)
        self.operations = sum(n.op == "call_function" for n in program.graph.nodes)
        self.weights: dict[tuple[int, ...], Weights] = {}       # key: the ids of the tensors
        self._latest: Weights | None = None
        self.refused: dict[Any, str] = {}       # signatures that PyTorch runs, with the reason
        self.missing: list[Missing] = []        # operations that PyTorch runs inside plans
        self.calls = self.changes = self.prepared = 0
        self.prepare_seconds = 0.0
        self._is_full = False       # whether plans were dropped
        self._lock = threading.RLock()
        # a forked child makes its own plans
        for name, make in (("weights", dict), ("_latest", lambda: None), ("_lock", threading.RLock)):
            remake_after_fork(self, name, make)
        # None if all sizes are constant, or if each set of sizes needs a plan of its own
        self.sizes = VaryingSizes.of(program.graph, {*static, *kept})
        self._why_many = ""         # the reason why one plan cannot serve all sizes, until a warning has given it
        self._split()
        share_cores()
        functions.add(self)

    def _split(self) -> None:
        known = {*self.static, *self.kept}
        self._others = [i for i, n in enumerate(n for n in self.program.graph.nodes if n.op == "placeholder") if i not in known]

    def __call__(self, given: Sequence[Any]) -> list[Any]:
        self.calls += 1
        weights = self._weights(given)
        places = weights.kept.places(given) if self.kept else None
        sizes = self.sizes
        values = None if sizes is None else sizes.values(given)
        form = form_of_argument if sizes is None or values is None else sizes.form
        key = (places and places.form, *[form(given[i], i) for i in self._others])
        plan: Plan | None = weights.plans.get(key)
        if plan is None or (values is not None and not plan.holds(values)):
            self.check(given)
            plan = self._planned(weights, key, given, sizes, values)
            if plan is None and self.sizes is not sizes:        # there is no plan for all of these sizes
                self.calls -= 1
                return self(given)
            if plan is None:
                return list(self.eager(*given))
        try:
            plan.last = self.calls
            if plan.own is not None and values is not None and plan.own.is_due():
                return plan.own.run(plan, weights, given, values)
            weights.turn_to(plan, places)
            if plan.missing and not plan.runs:
                return self._first_run(plan, given, values)
            return plan.run(given, places, values)
        except BaseException as error:
            if plan.is_spent:  # the run stopped half-way, so PyTorch must not run it again from the start; the next call makes another plan
                weights.plans.pop(key, None)
                raise
            if not isinstance(error, SvodError) or self._is_raised(error):
                raise
            self._say(key, str(error))
            return list(self.eager(*given))

    def _is_raised(self, error: Exception) -> bool:
        """Whether an error of a call is raised instead of leaving the call to PyTorch. An exported graph writes its inputs at the end,
        so for arguments that share written memory PyTorch's run would be wrong too."""
        return self.settings.strict or (self.bound is not None and isinstance(error, SharedMemoryError))

    @property
    def plans(self) -> list[Plan]:
        """All plans of this function."""
        return [one for w in self.weights.values() for p in w.plans.values() for one in (p, *(p.own.plans if p.own is not None else ()))]

    def _weights(self, given: Sequence[Any]) -> Weights:
        """The set of weights of a call; it is read now if it is new or has changed."""
        known = self._latest
        if known is None or not (self.bound is not None or known.is_of([given[i] for i in self.static])):
            # ids identify tensors, because a set keeps its tensors alive
            known = self.weights.get(tuple([id(given[i]) for i in self.static]))
        if known is None or not known.is_unchanged():
            return self._read(given, known)
        self._latest = known
        return known

    def _read(self, given: Sequence[Any], known: Weights | None) -> Weights:
        """Read the weights again, and replace `known`, the set with the same tensors before they changed."""
        static = [given[i] for i in self.static]
        key = tuple(map(id, static))
        with self._lock:
            if known is not None:
                if self.bound is not None:
                    self.bound()
                self._count_change(static)
                if not self.static:
                    return self._weights(given)
            self.weights.pop(key, None)
            while len(self.weights) >= MOST_WEIGHTS:
                del self.weights[next(iter(self.weights))]
            made = self._latest = self.weights[key] = Weights(static, WrittenArguments(self.kept, bound=self.bound is not None))
        return made

    def _count_change(self, static: Sequence[Any]) -> None:
        """Count a change of weights. After MOST_CHANGES, weights are no longer constants of plans."""
        self.changes += 1
        if self.changes > MOST_CHANGES:
            log.warning("svod: the weights of %s changed %d times: they are read anew in every run from now on, and not packed", self.name,
                        self.changes)
            self.static = []
            self.weights.clear()
            self._latest = None
            self._split()
        else:
            log.info("svod: the weights of %s changed: %d MB are packed again", self.name, bytes_of(static) // 2 ** 20)

    def _planned(self, weights: Weights, key: Any, given: Sequence[Any], sizes: VaryingSizes | None,
                 values: Mapping[Any, int] | None) -> Plan | None:
        """The plan for arguments of this form, made now if needed; None if PyTorch has to run them. With `values`, the values of `sizes`
        in this call, it is one plan for all sizes. If no such plan can be made, returns None and replaces `self.sizes`, and the caller
        tries again."""
        if key in self.refused:
            return None
        with self._lock:
            if values is not None and self.sizes is not sizes:
                return None
            plan: Plan | None = weights.plans.get(key)
            if plan is not None and (values is None or plan.holds(values)):
                return plan
            start = time.perf_counter()
            if self.bound is not None:      # arguments of an unknown form may include a buffer that was replaced
                self.bound()
            try:
                variables = None if values is None or sizes is None else sizes.variables(values)
                if variables is None:
                    self._check(given)
                constants = dict(zip(self.static, weights.tensors, strict=True))
                config = _as_torch_is_set(self.settings.config)
                plan = make_plan(self.program, given, constants, self.kept, config, variables)
            except Exception as error:
                if values is not None and sizes is not None:
                    self.sizes = sizes.joined(values)
                    weights.plans.pop(key, None)
                    self._why_many = str(error)
                    return None
                if self._is_raised(error):
                    raise
                if not isinstance(error, SvodError):
                    log.debug("svod: %s", self.name, exc_info=True)
                self._say(key, str(error) if isinstance(error, SvodError) else f"{type(error).__name__}: {error}")
                return None
            self.prepared += 1
            seconds = time.perf_counter() - start
            self.prepare_seconds += seconds
            plan.own = own_plans_of(self.program, plan, self.kept, config, seconds)
            self.missing = self.missing or plan.missing
            if len(weights.plans) >= MOST_PLANS and key not in weights.plans:
                if not self._is_full:
                    log.warning("svod: %s has had more than %d sets of sizes: for each new one, the plan used longest ago is dropped",
                                self.name, MOST_PLANS)
                self._is_full = True
                del weights.plans[min(weights.plans, key=lambda k: weights.plans[k].last)]
            weights.plans[key] = plan
            if self._why_many and self.sizes is None and len(weights.plans) == FEW:
                log.warning("svod: %s: %s has a plan for each set of sizes, which takes time for each new one: %s", self.entry, self.name,
                            self._why_many)
                self._why_many = ""
        return plan

    def _check(self, given: Sequence[Any]) -> None:
        """Raise UnsupportedError for tensors that svod cannot represent, and under `strict` for operations that svod lacks."""
        for t in given:
            if isinstance(t, torch.Tensor) and not is_representable(t):
                kind = t.dtype if t.layout is torch.strided else t.layout
                raise UnsupportedError(f"{str(kind).removeprefix('torch.')} tensors on {t.device}")
        if self.settings.strict and (missing := unsupported(self.program.graph)):
            raise UnsupportedError(missing_text(self.name, missing))

    def _first_run(self, plan: Plan, given: Sequence[Any], values: Mapping[Any, int] | None) -> list[Any]:
        """Run a plan that leaves operations to PyTorch, and warn about these once per graph."""
        if self.settings.strict:
            raise UnsupportedError(missing_text(self.name, plan.missing))
        start = time.perf_counter()
        outputs = plan.run(given, None, values)
        share = plan.clock.seconds / (time.perf_counter() - start)
        if len(self.plans) == 1:
            named = ", ".join(f"{m.name} ({m.place})" + (f" ×{m.times}" if m.times > 1 else "") for m in plan.missing)
            log.warning("svod: %s: %d of %d operations of %s are run by PyTorch: %s; %.0f %% of the time", self.entry,
                        sum(m.times for m in plan.missing), self.operations, self.name, named, 100 * share)
        return outputs

    def _say(self, key: Any, why: str) -> None:
        """Record that PyTorch runs arguments of this form, and log the reason once."""
        if why not in self.refused.values():
            log.warning("svod: %s: PyTorch runs %s as it is: %s", self.entry, self.name, why)
        self.refused[key] = why

    @property
    def name(self) -> str:
        return self.program.name


def missing_text(name: str, missing: Sequence[Missing]) -> str:
    """The message about operations that svod lacks, each on a line."""
    total = sum(m.times for m in missing)
    rows = "\n".join(f"  {m.name} ×{m.times}, first at {m.place}: {m.why}" for m in missing)
    return f"{name} has {total} operation{'s' if total > 1 else ''} that svod does not do:\n{rows}"


def _as_torch_is_set(config: PrepareConfig | None) -> PrepareConfig | None:
    """The configuration with PyTorch's number of threads, and without first forms where PyTorch is to be deterministic."""
    config = with_threads_of_torch(config)
    if torch.are_deterministic_algorithms_enabled():
        return replace(config or PrepareConfig.of_environment(), first_forms=False)
    return config
