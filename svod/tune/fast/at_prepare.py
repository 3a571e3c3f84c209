"""The policy "fast" at prepare time: a plan runs the kernels rounded that its records name, or chooses them after its first run.

    records of the plan within the limit, of the lock file or else the database → these kernels rounded, all others as in float32
    none, and a limit (`PrepareConfig.max_error`) → with BEAM, kernels that may be rounded are searched → the first run in float32 →
        `choose` over the inputs of that run → records, exchange
    none, and no limit → float32, and one line that says how to choose

Kernels that are not rounded have the chains that they have under "float32". A candidate to be rounded has the chain that the tuning
database, or the heuristic, has for it under "fast", if that begins with ROUND. A record holds for one plan (its calls and buffers), one
target, and constants of the same content. With BEAM and a limit, an unfinished search goes on; a choice of the database is made anew if
the candidates have other chains after it.
"""
from __future__ import annotations

import hashlib
import logging
import time
import weakref
from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import numpy as np

from svod.compile.plan.compiler import Choice, Compiled, compile_all
from svod.compile.plan.execution_plan import ExecutionPlan
from svod.compile.plan.unbound_plan import UnboundPlan, named_kernels
from svod.config import BeamConfig, log_once
from svod.core.cost.sketch import starts
from svod.core.graph.buffer import Buffer
from svod.core.kernel.apply import is_rounded
from svod.core.kernel.chain_text import chain_of, chain_text
from svod.core.kernel.kernel import Kernel
from svod.core.kernel.scheduler import Scheduler
from svod.errors import CompileError, KernelOptError
from svod.system.optional import optional
from svod.system.quantities import count
from svod.system.quantities import seconds as duration
from svod.tune.capture import plan_digest
from svod.tune.chains import choose_each, foreign_fault, own_fault
from svod.tune.db import OWN, Rounding
from svod.tune.fast.report import HOW_TO_CHOOSE, OF_FIRST_RUN, by_plan, sentence
from svod.tune.fast.selection import Effect, Selection, select
from svod.tune.fast.trial import RoundedPlans, exchange
from svod.tune.plan_chains import searched
from svod.tune.relatives import kernel_record
from svod.tune.resolved import Resolved

log = logging.getLogger("svod")



_ChoiceKey = tuple[str, str, str, float]     # of `Rounding.choice`


class _Stored(NamedTuple):
    """The records of a stored choice. `lock`: the lock file that has it; None: the database has it. `is_own`: whether this machine's own
    runs made it."""

    records: list[Rounding]
    lock: str | None
    is_own: bool


class FastPlan:
    """A plan that is prepared under the policy "fast". `choices`: the chains of the kernels that it runs rounded. `is_interrupted`: whether
    Ctrl-C has ended a search of their chains."""

    def __init__(self, unbound: UnboundPlan, constants: Sequence[tuple[int, Any]], resolved: Resolved, given: Collection[str]) -> None:
        self._unbound, self._resolved = unbound, resolved
        self._kernels = {key: k for key, k in unbound.kernels.items() if k.library_kernel is None and key not in given}
        self._digest = plan_digest(unbound, resolved.target.key)
        self._weights = weights_digest(constants)
        self._passed_over = ""      # the first stored choice for the plan that does not hold, and why, in words
        self._known, self.is_interrupted = self._stored(), False
        config = resolved.config
        if config.beam is not None and config.max_error is not None and (self._known is None or self._known.lock is None):
            self._known = self._after_search(self._known, config.beam)
        self.choices = {} if self._known is None else self._rounded(self._known)

    @property
    def is_open(self) -> bool:
        """Whether the kernels are chosen after the first run."""
        return self._known is None and self._resolved.config.max_error is not None

    def _stored(self) -> _Stored | None:
        """The choice that holds for the plan and the limit of the configuration: that of the lock file, else the latest of the database."""
        resolved, config = self._resolved, self._resolved.config
        locked = [x.record for x in resolved.roundings if (x.record.target, x.record.plan) == (resolved.target.key, self._digest)]
        for known in self._holding(locked, frozenset(), f"the lock file {config.lock}"):
            return _Stored(known, config.lock, False)
        if not config.consults_database:
            return None
        found = resolved.db.select(Rounding, target=resolved.target.key, plan=self._digest, shipped=True)
        foreign = frozenset([r.choice for r, layer in found if layer != OWN])
        unused = foreign if config.imported == "ignore" else frozenset[_ChoiceKey]()
        for known in self._holding([r for r, _ in found], unused, "the tuning database"):
            return _Stored(known, None, known[0].choice not in foreign)
        return None

    def _holding(self, records: Sequence[Rounding], unused: Collection[_ChoiceKey], where: str) -> list[list[Rounding]]:
        """Of records for the plan, the choices that hold. `unused`: choices that are not to be used, as they were made elsewhere."""
        objections = [(r, self._objection(r, r.choice in unused)) for r in records if r.kernel in self._unbound.kernels]
        holding = by_plan(r for r, reason in objections if reason is None)
        if objections and not holding and not self._passed_over:
            _, reason = max(objections, key=lambda pair: pair[0].taken_at)
            self._passed_over = f"the choice of {where} {reason}"
        return holding

    def _objection(self, r: Rounding, is_unused: bool) -> str | None:
        """Why a choice for the plan does not hold; None if it does."""
        most = self._resolved.config.max_error
        if r.weights != self._weights:
            return "is for other weights"
        if is_unused:
            return "is of another machine, and none of these are used (SVOD_IMPORTED)"
        if most is not None and not r.plan_error <= most <= r.max_error:
            return f"has an error of {r.plan_error:.1e} where {r.max_error:g} was allowed, and {most:g} is allowed now"
        return None

    def _rounded(self, stored: _Stored) -> dict[str, Choice]:
        """The chains of the kernels that are rounded by a stored choice. Chains that may not be used are left out, and one line says so."""
        choices, problems, fault = dict[str, Choice](), list[str](), own_fault if stored.is_own else foreign_fault
        for r in [r for r in stored.records if r.used]:
            try:
                chain = chain_of(r.chain)
                problem = fault(self._unbound.kernels[r.kernel], chain, self._resolved, r.linear)
            except KernelOptError as e:
                problem = f"does not apply: {e}"
            if problem is not None:
                problems.append(f"the chain of {r.kernel[:12]} {problem}")
                continue
            error = "" if r.error is None else f" for an error of {r.error:.1e}"
            why = f"rounded: saves {duration(max(0.0, r.before - r.after))} a run{error}"
            choices[r.kernel] = Choice(chain, "fast", why if stored.lock is None else f"{why}, by {stored.lock}")
        if problems:
            log_once(log, logging.WARNING, f"numerics=fast: {count(len(problems), 'kernel')} of a plan "
                                           f"{'stays' if len(problems) == 1 else 'stay'} in float32: {problems[0]}; {HOW_TO_CHOOSE}")
        return choices

    def _after_search(self, known: _Stored | None, beam: BeamConfig) -> _Stored | None:
        """Search the chains of the kernels that may be rounded. Returns the choice that holds after it: none if the candidates have other
        chains than when it was made."""
        from svod.tune.at_prepare import searches_interrupted  # imported here, as only searches need it
        resolved, interrupted = self._resolved, searches_interrupted()
        kernels = {key: k for key, k in self._kernels.items() if _may_be_rounded(k, resolved)}
        with optional(log, "kernels are not searched with rounded factors"):
            found = searched(self._unbound, kernels, choose_each(kernels, resolved), resolved, beam)
            self.is_interrupted = searches_interrupted() > interrupted
            if found and known is not None:
                now = {key: chain_text(choice.chain) for key, choice in self._candidates().items()}
                return known if now == {r.kernel: chain_text(r.chain) for r in known.records} else None
        return known

    def attach(self, plan: ExecutionPlan, exact: Mapping[str, Compiled]) -> None:
        """Let the plan choose its kernels after its first run, if that is to be done. `exact`: the code that it begins with."""
        most, of_plan = self._resolved.config.max_error, weakref.ref(plan)
        if self._known is None and most is not None:
            if self._passed_over:
                log_once(log, logging.WARNING, f"numerics=fast: kernels are chosen after a plan's first run, as {self._passed_over}")
            plan.call_after_run(lambda: self._choose_for(of_plan(), exact, most))
        elif self._known is None and any(_may_be_rounded(k, self._resolved) for k in self._kernels.values()):
            reason = f"as {self._passed_over or 'no kernels are chosen to be rounded yet'}; {HOW_TO_CHOOSE}"
            if self._resolved.config.capture is not None and not self._passed_over:
                reason = "as it is captured, and captures read no choice of the database"
            log_once(log, logging.WARNING, f"numerics=fast: a plan runs in float32, {reason}")

    def _choose_for(self, plan: ExecutionPlan | None, exact: Mapping[str, Compiled], most: float) -> None:
        if plan is not None:
            with optional(log, "a plan stays in float32, as no kernels could be chosen to be rounded"):
                self.choose(plan, exact, most)

    # -- choosing ----------------------------------------------------------------------------------------------------------
    def choose(self, plan: ExecutionPlan, exact: Mapping[str, Compiled], most: float) -> list[Rounding]:
        """Choose the kernels to round over the inputs that are bound to the plan now, let the plan run them, store the choice, and say so.
        [] if no kernel may be rounded, or if the plan has no float outputs to compare."""
        rounded = self._compiled(self._candidates())
        if not rounded:
            return []
        trial = RoundedPlans(plan, self._unbound, exact, rounded)
        if not trial.has_floats:
            log.warning("numerics=fast: a plan stays in float32, as none of its outputs is a float to compare")
            return []
        effects = trial.effects()
        selection = select(effects, trial.error_of, most)
        before, after = trial.times(selection.kernels) if selection.kernels else trial.times_in_float32()
        if after >= before:
            selection, after = Selection(frozenset(), 0.0), before
        is_run = not selection.kernels or exchange(plan, trial.code_of(selection.kernels))
        chosen = self._records(effects, selection, rounded, most, before, after)
        names = {key: named.name for key, named in named_kernels(self._unbound.calls).items()}
        self._resolved.db.record([*chosen, *(kernel_record(self._unbound.kernels[key], names[key]) for key in rounded)])
        log.warning("%s%s", sentence(chosen), "" if is_run else "; this plan was inside a run, and goes on in float32 until it is prepared "
                                                                "again")
        return chosen

    def _candidates(self) -> dict[str, Choice]:
        """The chains of the kernels whose best known chain rounds them."""
        return {key: replace(found, source="fast") for key, found in choose_each(self._kernels, self._resolved).items()
                if is_rounded(found.chain)}

    def _compiled(self, choices: Mapping[str, Choice]) -> dict[str, Compiled]:
        try:
            return compile_all({key: self._unbound.kernels[key] for key in choices}, choices, self._resolved.compiler)
        except (KernelOptError, CompileError) as e:
            log.warning("numerics=fast: a plan stays in float32, as its rounded kernels cannot be compiled (%s)", e)
            return {}

    def _records(self, effects: Sequence[Effect], selection: Selection, rounded: Mapping[str, Compiled], most: float, before: float,
                 after: float) -> list[Rounding]:
        target, codegen, now = self._resolved.target.key, self._resolved.compiler.pair.revision, time.time()
        return [Rounding(
            kernel=e.kernel, target=target, plan=self._digest, weights=self._weights,
            chain=tuple([tuple(o.to_json()) for o in rounded[e.kernel].chain]), linear=rounded[e.kernel].linear, codegen=codegen,
            samples=OF_FIRST_RUN, max_error=most, error=e.error if np.isfinite(e.error) else None, before=e.before, after=e.after,
            used=e.kernel in selection.kernels, plan_error=selection.error, plan_before=before, plan_after=after, taken_at=now)
            for e in effects]


def _may_be_rounded(kernel: Kernel, resolved: Resolved) -> bool:
    return len(starts(Scheduler(kernel, resolved.target))) > 1


def fast_plan(unbound: UnboundPlan, arrays: Sequence[Any], storages: Mapping[int, Buffer], resolved: Resolved,
              given: Collection[str]) -> FastPlan | None:
    """The plan under the policy "fast", or None if it runs in float32 because it calls functions or copies between devices, or because no
    opts are to be used. `arrays`, `storages`: the memory of its buffers. `given`: the kernels whose chains PrepareConfig.opts gives."""
    if unbound.functions or unbound.copies or not unbound.kernels or resolved.config.noopt:
        return None
    constants = [(b.size, arrays[i] if arrays[i] is not None else storages[i].array)
                 for i, b in enumerate(unbound.buffers) if b.kind == "constant" and (arrays[i] is not None or i in storages)]
    return FastPlan(unbound, constants, resolved, given)


def weights_digest(constants: Sequence[tuple[int, Any]]) -> str:
    """A digest of the size and the whole content of each constant. 400 MB took 0.42 s (one core of an Intel Xeon)."""
    made = hashlib.blake2b(digest_size=16)
    for size, array in constants:
        made.update(size.to_bytes(8, "little"))
        made.update(np.asarray(array).reshape(-1).view(np.uint8).data)
    return made.hexdigest()
