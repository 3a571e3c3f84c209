"""Optuna: a study whose trials are chains. A trial makes one choice after the other, in Optuna's define-by-run form:

    start              the state to begin with: one of the fastest measured states
    change, to         an opt of that state's chain, and the opt that replaces it; or no change
    opts               the number of opts to add, at most MOST_ADDED
    opt, amount        for each added opt: its kind and axis, then its argument

Optuna requires that the choices of a parameter never change. A parameter's name therefore ends in a digest of its choices, and the study
applies what it learned of a parameter wherever the same choices come up again. The sampler is Optuna's default, TPE. A trial whose
candidate failed is reported to the study as FAIL. So is a trial that ends in a known state; the trial after it makes random choices, as TPE
would go on to propose the known state, which it predicts to be the best.

The study is in memory. With `BEAM_OPTUNA_STORAGE` finished trials are also written to a study of that storage, for `optuna-dashboard`; its
name is the kernel's key. Trials that end in a known state are not written.
"""
from __future__ import annotations

import hashlib
import logging
from collections.abc import Sequence
from typing import Any

from svod.config import BeamConfig
from svod.core.kernel.chain_text import chain_text
from svod.core.kernel.scheduler import Opt, Scheduler
from svod.errors import TuneError
from svod.tune.measure.candidate import Candidate, Origin, Status
from svod.tune.search.actions import default_actions
from svod.tune.search.cost_models import CostModel
from svod.tune.search.strategies.strategy import Proposer, Verify

try:
    import optuna
    from sqlalchemy.exc import SQLAlchemyError
except ImportError as e:
    raise TuneError(f"the strategy optuna needs the package optuna ({e}): pip install 'svod[tune]'") from None


log = logging.getLogger("svod.tune")

STARTS = 2             # trials start from the STARTS × width fastest states
MOST_ADDED = 3         # the most opts that a trial adds
VAIN_TRIALS = 10       # most trials per candidate of a round; a round may then have fewer candidates
NO_CHANGE = "-"
STORAGE_ERRORS = (optuna.exceptions.OptunaError, SQLAlchemyError, ImportError, ValueError, OSError)


def named(what: str, choices: Sequence[Any]) -> str:
    """The name of a parameter with these choices."""
    return f"{what} #{hashlib.blake2b(repr(choices).encode(), digest_size=4).hexdigest()}"


class OptunaStudy(Proposer):
    """Proposes the states that the trials of an Optuna study lead to."""

    def __init__(self, base: Scheduler, config: BeamConfig, model: CostModel | None = None) -> None:
        super().__init__(base, config, model)
        optuna.logging.set_verbosity(optuna.logging.WARNING)        # otherwise Optuna logs each trial to stderr
        self.learning = optuna.samplers.TPESampler(seed=config.seed, constant_liar=True)
        self.chance = optuna.samplers.RandomSampler(config.seed)
        self.study = optuna.create_study(sampler=self.learning)
        self.mirror = open_mirror(config.optuna_storage, base.kernel.key) if config.optuna_storage else None
        self.open: dict[bytes, optuna.Trial] = {}       # trials that wait for their candidate's time, by its digest
        self.changes: dict[bytes, dict[str, dict[str, Scheduler]]] = {}

    # -- propose ----------------------------------------------------------------------------------------------------------
    def propose(self) -> list[Candidate]:
        self.round += 1
        starts = {chain_text(c.chain) or "untouched": c.state for c in self.fastest(STARTS * self.width)} or {"untouched": self.base}
        for _ in range(VAIN_TRIALS * self.room):
            if self.queued >= self.room:
                break
            trial = self.study.ask()
            state = self.run(trial, starts)
            if self.enqueue(state, Origin.TRIAL):
                self.open[state.digest] = trial
                self.study.sampler = self.learning
            else:
                self.study.tell(trial, state=optuna.trial.TrialState.FAIL)
                self.study.sampler = self.chance
        return self.begin_round(list(self.queue.values())[:self.room])

    def run(self, trial: optuna.Trial, starts: dict[str, Scheduler]) -> Scheduler:
        """The state that a trial's choices lead to."""
        def choose(what: str, choices: Sequence[Any]) -> Any:
            return choices[0] if len(choices) == 1 else trial.suggest_categorical(named(what, choices), choices)

        state = starts[choose("start", tuple(starts))]
        changes = self.changes_of(state)
        place = choose("change", (NO_CHANGE, *changes))
        if place != NO_CHANGE:
            state = changes[place][choose(f"{place} to", tuple(changes[place]))]
        for number in range(choose("opts", tuple(range(MOST_ADDED + 1)))):
            kinds: dict[str, dict[str, Opt]] = {}
            for opt in default_actions(state, self.lanes):
                kinds.setdefault(f"{opt.op} {opt.axis}", {})[str(opt.arg)] = opt
            if kinds:
                kind = choose(f"opt {number}", tuple(kinds))
                opt = kinds[kind][choose(kind, tuple(kinds[kind]))]
                state = self.after_tied(state, opt) or self.after(state, opt) or state
        return state

    def changes_of(self, state: Scheduler) -> dict[str, dict[str, Scheduler]]:
        """The changes that a trial may make to a state: opt of the state's chain, as text → (its replacement, as text → the state after
        it)."""
        if state.digest not in self.changes:
            chain, found = state.applied_opts, dict[str, dict[str, Scheduler]]()
            for changed in self.mutate(chain):
                now = changed.applied_opts
                i = next((i for i, (a, b) in enumerate(zip(chain, now, strict=False)) if a != b), len(now))
                becomes = "left out" if len(now) < len(chain) else str(now[i].arg)
                found.setdefault(str(chain[i]), {}).setdefault(becomes, changed)
            self.changes[state.digest] = found
        return self.changes[state.digest]

    # -- measured ---------------------------------------------------------------------------------------------------------
    def keep(self, pool: Sequence[Candidate], verify: Verify) -> None:
        super().keep(pool, verify)
        for digest in [d for d in self.open if self.seen[d].status is not Status.QUEUED]:
            self.tell(self.open.pop(digest), self.seen[digest])

    def tell(self, trial: optuna.Trial, c: Candidate) -> None:
        """End a trial: report the seconds of its candidate to the study, or that it failed."""
        trial.set_user_attr("chain", chain_text(c.chain))
        trial.set_user_attr("status", str(c.status))
        told = self.study.tell(trial, c.fitness) if c.samples else self.study.tell(trial, state=optuna.trial.TrialState.FAIL)
        if self.mirror is not None:
            try:
                self.mirror.add_trial(told)
            except STORAGE_ERRORS as e:
                log.warning("the Optuna storage cannot be written and is left alone from now on: %s", e)
                self.mirror = None


def check_storage(url: str) -> None:
    """Raise TuneError if the storage at `url` cannot be opened; "" stands for no storage."""
    if url:
        try:
            optuna.get_all_study_names(url)
        except STORAGE_ERRORS as e:
            raise TuneError(f"the Optuna storage {url!r} cannot be used: {e}") from e


def open_mirror(url: str, name: str) -> optuna.Study:
    """Open the study `name` in the storage at `url`, or create it. Raises TuneError where the storage cannot be opened."""
    try:
        return optuna.create_study(study_name=name, storage=url, load_if_exists=True)
    except STORAGE_ERRORS as e:
        raise TuneError(f"the Optuna storage {url!r} cannot be used: {e}") from e
