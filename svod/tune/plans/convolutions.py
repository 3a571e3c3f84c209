"""The choice which convolutions of a graph are computed by Fourier transforms (`svod.core.convolution.by_fourier`), before it is scheduled.

    conv → times of both forms in a plan (`svod.tune.plans.pair_times`), else predictions (`svod.tune.plans.predicted_forms`) → its form

The transformed form rounds otherwise, so the policy "same" has none; a capture says so of each convolution that has one under other
policies. It adds transformed weights to the constants of a plan, which `PrepareConfig.transformed_mb` limits.
"""
from __future__ import annotations

import logging
import math
from collections.abc import Container, Mapping, Sequence
from typing import NamedTuple

from svod.core.convolution.by_fourier import ConvolutionSizes, Lengths, by_fourier, sizes_of, table_of
from svod.core.graph.callback import functions_of
from svod.core.graph.channels import Convolution, convolution_of
from svod.core.graph.devices import device_of
from svod.core.ir.origin import inherit_origin
from svod.core.ir.uop import Ops, UOp
from svod.core.machine.target import HOST, SAME
from svod.system.quantities import count, digits
from svod.tune.plans.forms import ROUNDS_OTHERWISE, ConvolutionForm, describe, form_record, key_of, measured_form
from svod.tune.plans.pair_times import form_words
from svod.tune.plans.predicted_forms import Predicted, predicted_forms, rough_forms
from svod.tune.plans.transformed import MEGABYTE
from svod.tune.resolved import Resolved

log = logging.getLogger("svod.tune")


class _Considered(NamedTuple):
    """A convolution for which transforms are considered: the node that sums it, and the bytes that transformed weights add."""

    node: UOp
    sizes: ConvolutionSizes
    form: ConvolutionForm
    added: int


class Rewritten(NamedTuple):
    """A graph with convolutions by transforms. `weights`: the nodes that hold transformed weights; `tables`: BUFFERs of roots of unity,
    which are constants; `forms`: the forms of the convolutions for which transforms were considered."""

    sink: UOp
    weights: frozenset[UOp] = frozenset()
    tables: frozenset[UOp] = frozenset()
    forms: tuple[ConvolutionForm, ...] = ()


def with_transforms(graph: UOp, constants: frozenset[UOp], resolved: Resolved, other: str = "") -> Rewritten:
    """Rewrite the convolutions of a graph for which transforms are faster, by measurements or else by prediction. `constants`: BUFFERs
    that are weights. `other`: the key of a convolution whose other form is taken."""
    if not _are_considered(resolved):
        return Rewritten(graph)
    found: dict[str, list[_Considered]] = {}
    lengths: dict[UOp, tuple[ConvolutionSizes, Lengths]] = {}
    limit = resolved.config.transformed_mb
    room, left = math.inf if limit is None else limit * MEGABYTE, 0
    for u in graph.toposort():
        c = convolution_of(u)
        sizes = None if c is None or device_of(u) not in (None, HOST) else sizes_of(u, c)
        form = None if c is None or sizes is None else _form(u, c, sizes, _is_constant(c.weight, constants), resolved)
        if form is None or sizes is None:
            continue
        added = _added_bytes(u, sizes, form.lengths)
        found.setdefault(form.key, []).append(_Considered(u, sizes, form, added))
        if form.is_transformed and added <= room:
            lengths[u] = sizes, form.lengths
            room -= added
        else:
            left += form.is_transformed
    forms = {key: _within(nodes, lengths, room) for key, nodes in found.items()}
    if left:
        log.warning("%s of a plan %s directly, as transformed weights would take more memory than transformed_mb allows "
                    "(SVOD_TRANSFORMED_MB)", count(left, "convolution"), "compute" if left > 1 else "computes")
    if other in forms and forms[other].is_open:
        changed = {x.node: (x.sizes, x.form.lengths) for x in found[other]}
        lengths = {u: x for u, x in lengths.items() if u not in changed} if forms[other].is_transformed else {**lengths, **changed}
    return (_rewritten(graph, lengths) if lengths else Rewritten(graph))._replace(forms=tuple(forms.values()))


def _are_considered(resolved: Resolved) -> bool:
    """Whether transforms are considered at all, if only to say why a convolution is direct."""
    config, target = resolved.config, resolved.target
    is_said = target.numerics != SAME or config.capture is not None
    return is_said and not (target.has_groups or config.noopt or config.capture_device is not None)


def _within(nodes: Sequence[_Considered], transformed: Container[UOp], room: float) -> ConvolutionForm:
    """The form of the convolutions with one key, which is open if the limit of transformed weights allows either form of all of them.
    `transformed`: the nodes of the plan that are transformed; `room`: bytes that the limit leaves."""
    form, missing = nodes[0].form, [x.added for x in nodes if x.node not in transformed]
    if sum(missing) <= room:
        return form
    if not form.is_transformed:
        return form._replace(is_open=False)
    return form._replace(is_transformed=False, is_open=False, is_measured=False,
                         why="transformed_mb does not allow the transformed weights of all convolutions of its sizes")


def _form(u: UOp, c: Convolution, z: ConvolutionSizes, is_constant: bool, resolved: Resolved) -> ConvolutionForm | None:
    """The form of a convolution; None if transforms are not considered for it."""
    rough = rough_forms(z, u.dtype, is_constant, resolved.target)
    if not (rough.is_plausible or resolved.times):
        return None
    described = describe(u, c, z, is_constant)
    key, is_searched = key_of(described), resolved.config.capture is not None or resolved.config.beam is not None

    def predicted(close: bool) -> Predicted | None:
        return predicted_forms(u, c, z, key, is_constant, resolved.compiler, close=close)

    def may_be_faster() -> bool:
        found = predicted(True)
        return found is not None and not found.is_far_slower
    if resolved.target.numerics == SAME:
        p = predicted(True)
        return None if p is None else ConvolutionForm(key, described, p.lengths, False, ROUNDS_OTHERWISE, False)
    record = form_record(key, rough.cycles, resolved, may_be_faster)
    if not rough.is_plausible:      # lines of the lock file that say otherwise have been reported
        return None
    if record is not None:
        return measured_form(key, described, record, resolved)
    p = predicted(is_searched)
    return None if p is None else ConvolutionForm(key, described, p.lengths, p.is_faster, _prediction_words(p), p.is_close)


def _prediction_words(p: Predicted) -> str:
    return f"predicted: directly {digits(p.direct)} cycles, {form_words(p.lengths)} {digits(p.transformed)}"


def _rewritten(graph: UOp, lengths: Mapping[UOp, tuple[ConvolutionSizes, Lengths]]) -> Rewritten:
    done: dict[UOp, UOp] = {}
    weights: dict[UOp, None] = {}
    tables: set[UOp] = set()
    for u in graph.toposort():
        src = tuple([done[s] for s in u.src])
        node = u if src == u.src else u.replace(src=src)
        if u in lengths:
            c = convolution_of(node)
            assert c is not None
            made = by_fourier(node, c, *lengths[u])
            for n in made.value.toposort(gate=lambda n: n not in done):
                inherit_origin(n, u)
            node = made.value
            weights[made.weights] = None
            tables.update(table_of(n, inverse, u.dtype) for n in lengths[u][1] for inverse in (False, True))
        elif node is not u:
            inherit_origin(node, u)
        done[u] = node
    return Rewritten(done[graph], frozenset(weights), frozenset(tables))


def _is_constant(weight: UOp, constants: frozenset[UOp]) -> bool:
    return constants.issuperset(weight.walk(Ops.BUFFER)) and not functions_of(weight)


def _added_bytes(u: UOp, z: ConvolutionSizes, lengths: Lengths) -> int:
    """Bytes by which transformed weights are larger than the weights."""
    per_frequency = 4 if z.sums_channels else 2
    return z.groups * z.inputs * z.outputs * (per_frequency * math.prod(lengths) - math.prod(z.taps)) * u.dtype.itemsize
