"""Optuna: a study whose trials are chains, written as a program that asks for one choice after the other (define by run).

    start              one of the fastest measured states
    change, to         one opt of its chain, and what it becomes; or none
    opts               how many opts are added, at most MOST_ADDED
    opt, amount        of each: its kind and axis, then its amount or place

The choices of a parameter must never change, so its name ends in a digest of them: what was learned of a choice counts wherever the same
choice comes up again. The sampler is Optuna's default, TPE. A trial whose candidate failed is told as FAIL. So is one in vain, which ends
in a known state; the next one then makes random choices, as the sampler would go on to propose what it holds to be best.

The study is in memory. With `BEAM_OPTUNA_STORAGE` finished trials are also written to a study of that storage, for `optuna-dashboard`; its
name is the kernel's key. Trials in vain are left out.
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

STARTS = 2             # times width: the fastest states from which trials start
MOST_ADDED = 3         # opts that a trial adds
VAIN_TRIALS = 10       # trials in vain, for each candidate of a round, after which the round has what it has
NONE = "-"
STORAGE_ERRORS = (optuna.exceptions.OptunaError, SQLAlchemyError, ImportError, ValueError, OSError)


def named(what: str, choices: Sequence[Any]) -> str:
    """The name of a parameter with these choices."""
    return f"{what} #{hashlib.blake2b(repr(choices).encode(), digest_size=4).hexdigest()}"


class OptunaStudy(Proposer):
    """Proposes what an Optuna study asks for."""

    def __init__(self, base: Scheduler, config: BeamConfig, model: CostModel | None = None) -> None:
        super().__init__(base, config, model)
        optuna.logging.set_verbosity(optuna.logging.WARNING)        # else each trial is a line on stderr
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
        place = choose("change", (NONE, *changes))
        if place != NONE:
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
        """By opt of the state's chain, what it may become, and the state then."""
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
        """End a trial with what became of its candidate: its seconds, or a failure."""
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
    """Raise TuneError for a storage that cannot be opened; "" is none."""
    if url:
        try:
            optuna.get_all_study_names(url)
        except STORAGE_ERRORS as e:
            raise TuneError(f"the Optuna storage {url!r} cannot be used: {e}") from e


def open_mirror(url: str, name: str) -> optuna.Study:
    """The study of this name in a storage, made where there is none. Raises TuneError where the storage cannot be opened."""
    try:
        return optuna.create_study(study_name=name, storage=url, load_if_exists=True)
    except STORAGE_ERRORS as e:
        raise TuneError(f"the Optuna storage {url!r} cannot be used: {e}") from e
