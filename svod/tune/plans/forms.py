"""The forms of a convolution: directly, and by Fourier transforms of blocks. Where both have been timed inside a plan, the times decide
(`svod.tune.plans.pair_times`), but what others say of transforms that are predicted to be far slower does not count.
"""
from __future__ import annotations

import hashlib
from collections.abc import Callable, Collection, Sequence
from typing import NamedTuple

from svod.compile.plan.unbound_plan import UnboundPlan
from svod.core.convolution.by_fourier import ConvolutionSizes, Lengths
from svod.core.graph.channels import Convolution
from svod.core.graph.shapes import shape_of
from svod.core.ir.uop import Ops, UOp
from svod.core.machine.target import SAME
from svod.tune.db import FormTimes
from svod.tune.plans.pair_times import deciding_record, form_words, times_words
from svod.tune.resolved import Resolved


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
    record = form_record(form.key, None, resolved, lambda: not is_kept, timed)
    return Decided(form) if record is None else Decided(measured_form(form.key, form.described, record, resolved), record)


def decided_words(predicted: ConvolutionForm, decided: Decided) -> str:
    """A convolution, its form and the reason, with the prediction where that does not decide."""
    return decided.form.words + (f"; {predicted.why}" if decided.form.why != predicted.why else "")


def measured_form(key: str, described: str, record: FormTimes, resolved: Resolved) -> ConvolutionForm:
    """The form of a convolution by the record that decides about it."""
    where = f" (the lock file {resolved.config.lock})" * any(line.record is record for line in resolved.times)
    return ConvolutionForm(key, described, record.lengths, record.is_faster, times_words(record) + where, True, True)


def form_record(key: str, known: Collection[Lengths] | None, resolved: Resolved, may_be_faster: Callable[[], bool],
                timed: FormTimes | None = None) -> FormTimes | None:
    """The record that decides about a convolution; None where there is none. `known`: the block lengths that it may have; None: any.
    `may_be_faster`: whether transforms that others found faster are believed. `timed`: as `deciding_record` has it."""
    return deciding_record(FormTimes, key, resolved, timed, lambda r, is_own: disbelief(r, known, lambda: is_own or may_be_faster()))


def disbelief(r: FormTimes, known: Collection[Lengths] | None, may_be_faster: Callable[[], bool]) -> str | None:
    """Why a record without a fault does not count for a convolution that may have the block lengths `known`; None if it does."""
    if known is not None and r.lengths not in known:
        return "its block lengths are none that svod tries"
    return "transforms, which it found faster, are predicted to be far slower" if r.is_faster and not may_be_faster() else None
