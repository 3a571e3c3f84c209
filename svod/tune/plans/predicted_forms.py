"""The predicted cycles of a convolution directly, and by Fourier transforms of the block lengths that suit it best.

    rough cycles of each block length → schedules of the best ones, and of the direct form → the predicted cycles of their kernels

The transformed form is taken if it is predicted to be faster by ALGORITHM_FACTOR, as every algorithm.
"""
from __future__ import annotations

import hashlib
import sys
import threading
from collections.abc import Mapping
from functools import lru_cache
from math import inf, prod
from typing import NamedTuple

from svod.compile.plan.compiler import Compiler
from svod.core.convolution.by_fourier import ConvolutionSizes, Lengths, by_fourier
from svod.core.convolution.price import block_lengths, library_cycles, most_direct_cycles, rough_cycles
from svod.core.cost.sketch import ALGORITHM_FACTOR
from svod.core.graph.channels import Convolution, convolution_of, with_values
from svod.core.graph.graph import buffer, contiguous, sink, storage_view
from svod.core.graph.shapes import shape_of
from svod.core.ir.dtype import DType
from svod.core.ir.uop import Ops, UOp
from svod.core.kernel.apply import apply_opts
from svod.core.kernel.kernel import Kernel
from svod.core.kernel.scheduler import Scheduler
from svod.core.machine.target import Target
from svod.core.schedule.schedule import copies_to, create_schedule
from svod.errors import FormatError
from svod.system.checked import checked
from svod.system.forksafe import remake_after_fork

SCHEDULED = 2           # block lengths whose kernels are priced one by one
PLAUSIBLE = 2.0         # A form is worth timing if it is predicted to take at most so many times the other's cycles; errors reached 1.9.


class Predicted(NamedTuple):
    """The predicted cycles of a convolution directly, and by transforms of blocks of `lengths` positions. `is_faster`: whether the latter
    are so much fewer that the transformed form is taken."""

    lengths: Lengths
    direct: float
    transformed: float
    is_faster: bool

    @property
    def is_close(self) -> bool:
        """Whether the form that is not taken may be the faster one."""
        return not (self.is_far_slower or (self.is_faster and self.direct >= PLAUSIBLE * self.transformed))

    @property
    def is_far_slower(self) -> bool:
        """Whether the transformed form is so much slower that it is not worth timing, and no times of other machines are believed."""
        return self.transformed >= PLAUSIBLE * self.direct


class Rough(NamedTuple):
    """The rough cycles of a convolution by transforms of each block length, and cycles that its direct form hardly exceeds."""

    cycles: Mapping[Lengths, float]
    most_direct: float

    @property
    def best(self) -> list[Lengths]:
        """The block lengths whose kernels are priced one by one."""
        return sorted(self.cycles, key=lambda n: (self.cycles[n], n))[:SCHEDULED]

    @property
    def may_be_faster(self) -> bool:
        return min(self.cycles.values(), default=inf) * ALGORITHM_FACTOR < self.most_direct

    @property
    def is_plausible(self) -> bool:
        """Whether the transformed form may be worth timing."""
        return min(self.cycles.values(), default=inf) < PLAUSIBLE * self.most_direct


@lru_cache(maxsize=4096)
def rough_forms(z: ConvolutionSizes, dtype: DType, is_constant: bool, target: Target) -> Rough:
    """The rough cycles of a convolution. `is_constant`: its weights are."""
    return Rough({n: rough_cycles(z, n, is_constant, dtype, target) for n in block_lengths(z)}, most_direct_cycles(z, dtype, target))


_predicted: dict[tuple[str, str, bool], Predicted | None] = {}
_lock = threading.Lock()
remake_after_fork(sys.modules[__name__], "_lock", threading.Lock)


def predicted_forms(u: UOp, c: Convolution, z: ConvolutionSizes, key: str, is_constant: bool, compiler: Compiler,
                    close: bool) -> Predicted | None:
    """What the forms of the convolution `c`, which the node `u` sums, are predicted to take; None if transforms are not considered, as
    they are clearly slower. `key`: the convolution's; `is_constant`: its weights are. `close`: consider transforms also where they may
    only be faster if the prediction is wrong."""
    at = key, compiler.target.key, close
    with _lock:
        if at in _predicted:
            return _predicted[at]
    rough = rough_forms(z, u.dtype, is_constant, compiler.target)
    found: Predicted | None = None
    if rough.may_be_faster if not close else rough.is_plausible:
        name = hashlib.blake2b(f"predicted forms {at}".encode(), digest_size=16).hexdigest()
        try:
            (found,) = checked(compiler.kept(name), tuple[Predicted | None], FormatError)
        except FormatError:
            found = _priced(_Alone.of(u, c, z, is_constant), rough, compiler, 1.0 / PLAUSIBLE if close else ALGORITHM_FACTOR)
            compiler.keep(name, [found])
        found = found if found is not None and found.lengths in rough.cycles else None
    with _lock:
        return _predicted.setdefault(at, found)


class _Alone(NamedTuple):
    """A convolution of an image and weights that are in memory: the node that sums it. `is_constant`: the weights are constants."""

    node: UOp
    sizes: ConvolutionSizes
    is_constant: bool

    @classmethod
    def of(cls, u: UOp, c: Convolution, z: ConvolutionSizes, is_constant: bool) -> _Alone:
        memory = {n: storage_view(buffer(n.dtype, prod(shape_of(n))), shape_of(n)) for n in (c.image, c.weight)}
        return cls(with_values(u, memory), z, is_constant)

    @property
    def convolution(self) -> Convolution:
        found = convolution_of(self.node)
        assert found is not None
        return found

    def direct_cycles(self, compiler: Compiler) -> float:
        weights = frozenset(self.convolution.weight.walk(Ops.BUFFER)) if self.is_constant else frozenset()
        return predicted_cycles(self.node, weights, compiler)

    def transformed_cycles(self, lengths: Lengths, compiler: Compiler) -> float:
        """The predicted cycles of a run; constant weights are transformed before it."""
        made = by_fourier(self.node, self.convolution, self.sizes, lengths)
        if not self.is_constant:
            return predicted_cycles(made.value, frozenset(), compiler)
        held = buffer(made.weights.dtype, prod(shape_of(made.weights)))
        value = with_values(made.value, {made.weights: storage_view(held, shape_of(made.weights))})
        return predicted_cycles(value, frozenset([held]), compiler)


def _priced(alone: _Alone, rough: Rough, compiler: Compiler, factor: float) -> Predicted | None:
    """The predicted cycles of both forms; None if none of the best block lengths has rough cycles below the direct form's over
    `factor`."""
    direct = alone.direct_cycles(compiler)
    best = [n for n in rough.best if rough.cycles[n] * factor < direct]
    if not best:
        return None
    cycles = {n: alone.transformed_cycles(n, compiler) for n in best}
    likely = [n for n in best if rough.may_be_faster and rough.cycles[n] * ALGORITHM_FACTOR < direct]
    fastest = min(likely or best, key=lambda n: cycles[n])
    return Predicted(fastest, direct, cycles[fastest], bool(likely) and cycles[fastest] * ALGORITHM_FACTOR < direct)


def predicted_cycles(value: UOp, constants: frozenset[UOp], compiler: Compiler) -> float:
    """The predicted cycles of the kernels that compute a value, each with the heuristic's chain."""
    calls = create_schedule(sink(contiguous(value)), constants).calls
    return sum(_kernel_cycles(Kernel(call.ast), compiler) for call in calls if not copies_to(call.ast))


def _kernel_cycles(kernel: Kernel, compiler: Compiler) -> float:
    target = compiler.target
    if kernel.library_kernel is not None:
        return library_cycles(kernel.library_kernel, target)
    return compiler.backend.cost(apply_opts(Scheduler(kernel, target), compiler.heuristic(kernel))).cycles
