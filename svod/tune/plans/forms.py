"""The forms of a convolution: directly, and by Fourier transforms of blocks. Where both have been timed inside a plan, the times decide.

    a line of the lock file → records of the tuning database → the prediction

Among records this machine's own go before others, those of a quiet machine before those of a busy one, and newer before older.
A record counts for the code generator that made its kernels, and until it is retracted; what others say of transforms that are predicted to
be far slower does not count. Of the database's records that count the first one decides that is of a quiet machine, or whose interval of
the ratio does not include 1; without one, the forms tie. Ties go to the direct form.
"""
from __future__ import annotations

import hashlib
import logging
from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import NamedTuple

from svod.compile.plan.unbound_plan import UnboundPlan
from svod.config import log_once
from svod.core.convolution.by_fourier import ConvolutionSizes, Lengths
from svod.core.graph.channels import Convolution
from svod.core.graph.shapes import shape_of
from svod.core.ir.uop import Ops, UOp
from svod.core.machine.target import SAME
from svod.system.quantities import count
from svod.system.quantities import seconds as duration
from svod.tune.db import OWN, FormTimes
from svod.tune.resolved import Resolved

log = logging.getLogger("svod.tune")


class ConvolutionForm(NamedTuple):
    """The form of a convolution in a plan. `key`, `described`: the convolution; `lengths`: the positions of a block in the transformed
    form; `is_transformed`: whether the plan has that one; `why`: the times or the predictions by which it was chosen, in words; `is_open`:
    whether it is worth timing both; `is_measured`: whether times decided."""

    key: str
    described: str
    lengths: Lengths
    is_transformed: bool
    why: str
    is_open: bool
    is_measured: bool = False

    @property
    def words(self) -> str:
        """The convolution, its form, and the reason."""
        return f"{self.described}: {form_words(self.lengths if self.is_transformed else None)}, {self.why}"


ROUNDS_OTHERWISE = f"numerics={SAME}, and transforms round otherwise"

#: The forms of the convolutions of a plan, each with the plan that has its other form, or None.
Forms = Sequence[tuple[ConvolutionForm, UnboundPlan | None]]


def form_words(lengths: Lengths | None) -> str:
    """The transformed form of a convolution with these block lengths, in words; None: its direct form."""
    return "directly" if lengths is None else f"by transforms of blocks of {'×'.join(map(str, lengths))}"


def chosen_words(r: FormTimes) -> str:
    """The faster one of the two forms of a record, in words."""
    if r.is_of_plan:
        return f"with {count(len(r.alternatives), 'alternative')}" if r.is_faster else "by the rules"
    return form_words(r.lengths if r.is_faster else None)


def times_words(r: FormTimes) -> str:
    """What the two forms took, in words."""
    untried = f"; {r.untried} were not tried, as the budget was spent" if r.untried else ""
    with_others = f"with {count(len(r.alternatives), 'alternative')}"
    direct, other = ("by the rules", with_others) if r.is_of_plan else ("directly", form_words(r.lengths))
    interval = f"95 % interval {r.ratio_low:.2f}–{r.ratio_high:.2f}×{', on a busy machine' * r.noisy}"
    if r.is_of_plan and not r.alternatives:
        return f"measured: by the rules {duration(r.direct)}, and no alternative was faster" + untried
    return f"measured{' in a plan' * (not r.is_of_plan)}: {direct} {duration(r.direct)}, {other} {duration(r.transformed)} " \
           f"({r.ratio:.2f}×, {interval})" + untried


def alternative_lines(r: FormTimes) -> list[str]:
    """What a plan does otherwise than by the rules, by the record about it, in words, a line for each kind."""
    done = Counter(a.partition(" ")[2] for a in r.alternatives if r.is_faster)
    return [f"{words}{f', {n} times' * (n > 1)}" for words, n in sorted(done.items())]


def describe(u: UOp, c: Convolution, z: ConvolutionSizes, is_constant: bool) -> str:
    """A convolution in words, with everything that its kernels depend on by itself."""
    image, padding = c.windows.src[0], ""
    if image.op is Ops.PAD:
        padding = " padded by " + ", ".join(f"{before}+{after}" for before, after in image.arg[0][2:])
        padding += f" of {image.arg[1]:g}" if image.arg[1] else ""
    taps = "×".join(map(str, (z.groups * z.outputs, z.inputs, *z.taps)))
    groups = f" in {z.groups} groups" if z.groups > 1 else ""
    return f"{u.dtype.name} convolution of {'×'.join(map(str, shape_of(c.image)))}{padding} with {'constant ' * is_constant}{taps}{groups}"


def key_of(described: str) -> str:
    """The key of a convolution, which stands in records where others have the key of a kernel."""
    return hashlib.blake2b(f"svod-convolution\n{described}".encode(), digest_size=16).hexdigest()


class Decided(NamedTuple):
    """The form that `prepare` gives a convolution. `times`: the record that decides about it; None: the prediction or a policy does."""

    form: ConvolutionForm
    times: FormTimes | None = None


def decided_form(form: ConvolutionForm, resolved: Resolved, timed: FormTimes | None = None) -> Decided:
    """The form of a convolution whose predicted form is known, as that of a captured plan is. `timed`: an own record that was just made,
    which counts also where it could not be stored."""
    if resolved.target.numerics == SAME:
        return Decided(form._replace(is_transformed=False, is_open=False, why=ROUNDS_OTHERWISE))
    is_kept = not form.is_open and not form.is_transformed      # transforms are predicted to be far slower, or the limit forbids them
    if is_kept and resolved.config.transformed_mb is not None:
        return Decided(form)
    record = deciding_record(form.key, None, resolved, lambda: not is_kept, timed)
    return Decided(form) if record is None else Decided(measured_form(form.key, form.described, record, resolved), record)


def decided_words(predicted: ConvolutionForm, decided: Decided) -> str:
    """A convolution, its form and the reason, with the prediction where that does not decide."""
    return decided.form.words + (f"; {predicted.why}" if decided.form.why != predicted.why else "")


def measured_form(key: str, described: str, record: FormTimes, resolved: Resolved) -> ConvolutionForm:
    """The form of a convolution by the record that decides about it."""
    where = f" (the lock file {resolved.config.lock})" * any(line.record is record for line in resolved.forms)
    return ConvolutionForm(key, described, record.lengths, record.is_faster, times_words(record) + where, True, True)


def deciding_record(key: str, known: Collection[Lengths] | None, resolved: Resolved, may_be_faster: Callable[[], bool],
                    timed: FormTimes | None = None) -> FormTimes | None:
    """The record that decides about a convolution; None where there is none. `known`: the block lengths that it may have; None: any.
    `may_be_faster`: whether transforms that others found faster are believed. `timed`: an own record beside those of the database. Where
    none of the lock file's lines counts, one warning says why."""
    config, target, revision = resolved.config, resolved.target.key, resolved.compiler.pair.revision
    lines = resolved.forms if config.capture is None else ()        # a capture has predicted forms
    locked = [line.record for line in lines if (line.kernel, line.target) == (key, target)]
    pairs = resolved.db.select(FormTimes, key, target, shipped=True) if config.consults_database else []
    if timed is not None:
        pairs = [*(pair for pair in pairs if pair[0].id != timed.id), (timed, OWN)]
    in_order = sorted(pairs, key=lambda pair: (pair[1] != OWN, pair[0].noisy, -pair[0].taken_at))
    stored = [r for r, layer in in_order if layer == OWN or config.imported != "ignore"]
    if not locked and not stored:
        return None
    own, barred = {r.id for r, layer in pairs if layer == OWN}, resolved.db.barred(key, target)

    def objection(r: FormTimes) -> str | None:
        reason = fault(r, revision, barred)
        return reason if reason is not None else disbelief(r, known, lambda: r.id in own or may_be_faster())
    of_lock = [(r, objection(r)) for r in reversed(locked)]
    if by_lock := [r for r, reason in of_lock if reason is None]:
        return by_lock[0]
    _say_unused(of_lock, config.lock)
    by_database = [r for r in stored if objection(r) is None]
    return next((r for r in by_database if r.is_decided or not r.noisy), by_database[0] if by_database else None)


def _say_unused(records: Sequence[tuple[FormTimes, str | None]], path: str | None) -> None:
    """Warn once of each reason for which records of a lock file do not count."""
    for r, reason in records:
        of = "a plan's alternatives" if r.is_of_plan else "a convolution's forms"
        log_once(log, logging.WARNING, f"the lock file {path}: a line with the times of {of} is not used: {reason}")


def disbelief(r: FormTimes, known: Collection[Lengths] | None, may_be_faster: Callable[[], bool]) -> str | None:
    """Why a record without a fault does not count for a convolution that may have the block lengths `known`; None if it does."""
    if known is not None and r.lengths not in known:
        return "its block lengths are none that svod tries"
    return "transforms, which it found faster, are predicted to be far slower" if r.is_faster and not may_be_faster() else None


def fault(r: FormTimes, revision: int, barred: Mapping[str, int]) -> str | None:
    """Why a record does not count; None if it does. `revision`: that of the code generator now; `barred`: those up to which forms were
    retracted (`TuningDB.barred`)."""
    if r.codegen != revision:
        return f"it was measured with code generator {r.codegen}, now {revision}"
    return "it was retracted" if revision <= barred.get(r.linear, -1) else None
