"""Verification of algorithms: a program that computes by a rewritten kernel is held to the errors of that kernel, and faults are found."""
from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
import pytest

from svod.core.ir import symbolic as sy
from svod.core.ir.dtype import dtypes
from svod.core.ir.uop import Ops, UOp
from svod.core.kernel.algorithms.winograd import winograd
from svod.core.kernel.kernel import Kernel
from svod.core.spec.evaluate import evaluate
from svod.tune.measure.measurer import Verification
from svod.tune.measure.verify import GuardedBuffers, Reference, make_inputs, verify, whole
from tests.core.corpus import data, kernel_of

CONVOLUTIONS = {
    "padded": Kernel(kernel_of((data(1, 6, 9, 7).conv2d(data(5, 6, 3, 3), padding=1) + data(5, 1, 1)).relu())),
    "one window": Kernel(kernel_of(data(2, 3, 4, 11).conv2d(data(4, 3, 1, 5)))),
    "many channels": Kernel(kernel_of(data(1, 70, 6, 6).conv2d(data(2, 70, 3, 3), padding=1))),
}
# windows by stages alone, and, as on targets with groups, by way of stages that copy the operands of the products
CASES = [(name, m, copies) for name in CONVOLUTIONS for m in (2, 4) for copies in (False, True)]


def compared(kernel: Kernel, computed: UOp, ran: UOp) -> Verification:
    """The verdict on a program that computes by the AST `ran`, held to the errors of `computed`."""
    def run(arrays: Sequence[np.ndarray[Any, Any]]) -> None:
        for slot, values in zip(sorted(set(kernel.outs)), evaluate(ran, arrays, exact=False), strict=True):
            arrays[slot][:] = values
    return verify(Reference(kernel, computed=computed, sets=Reference(kernel).sets), run, GuardedBuffers(kernel))


@pytest.mark.parametrize(("name", "m", "copies"), CASES)
def test_a_right_algorithm_passes(name: str, m: int, copies: bool) -> None:
    kernel = CONVOLUTIONS[name]
    ast = winograd(kernel, "out", m, copies).ast
    assert compared(kernel, ast, ast).right


@pytest.mark.parametrize("name", CONVOLUTIONS)
def test_the_errors_of_the_kernel_itself_do_not_allow_it(name: str) -> None:
    kernel = CONVOLUTIONS[name]
    assert compared(kernel, kernel.ast, winograd(kernel, "out", 4).ast).right is False


def faults(kernel: Kernel, ast: UOp) -> Iterator[tuple[str, UOp]]:
    """Rewritten kernels with one fault each: another coefficient, a tile without products, transposed or exchanged rows, no epilogue."""
    nodes = ast.toposort()
    own = {u.arg for u in kernel.ast.toposort() if u.op is Ops.CONST}
    for c in [u for u in nodes if u.op is Ops.CONST and u.dtype == dtypes.float32 and u.arg and u.arg not in own]:
        yield f"coefficient {c.arg}", ast.substitute({c: UOp.const(c.dtype, c.arg * 1.25)})
    reduce, = [u for u in nodes if u.op is Ops.REDUCE]
    stage, = [u for u in nodes if u.op is Ops.STAGE and u.src[0] is reduce]
    for r in stage.src[1:]:
        if sy.extent_of(r) > 1:
            missing = UOp(Ops.CMPLT, dtypes.bool, (r, sy.const(sy.extent_of(r) - 1))).alu(Ops.WHERE, reduce, UOp.const(reduce.dtype, 0))
            yield f"nothing at the end of {r.arg}", ast.substitute({stage: stage.replace(src=(missing, *stage.src[1:]))})
    for read in reduce.src[0].src:
        a, b, *rest = read.src[1:]
        if b in stage.src[1:3]:
            yield "transposed rows", ast.substitute({read: read.replace(src=(read.src[0], b, a, *rest))})
    choices = [u for u in nodes if u.op is Ops.WHERE and u.src[0].op is Ops.CMPEQ]
    for u in choices[::5]:
        yield "exchanged rows", ast.substitute({u: u.replace(src=(u.src[0], u.src[2], u.src[1]))})


@pytest.mark.parametrize(("name", "m", "copies"), CASES)
def test_faults_are_found(name: str, m: int, copies: bool) -> None:
    kernel = CONVOLUTIONS[name]
    ast = winograd(kernel, "out", m, copies).ast
    found = dict(faults(kernel, ast))
    assert len(found) >= 4
    for fault, wrong in found.items():
        assert compared(kernel, ast, wrong).right is False, fault


@pytest.mark.parametrize(("what", "change"), [
    ("one pixel of 10,000", lambda x: x.__setitem__(x.size // 2, 1e4)), ("zeros", lambda x: x.fill(0.0)),
    ("values from 1e-20 to 1e20", lambda x: x.__imul__(np.float32(10.0) ** np.linspace(-20, 20, x.size, dtype=np.float32)))])
@pytest.mark.parametrize("m", [2, 4])
def test_bounds_hold_for_outliers(what: str, change: Callable[[np.ndarray[Any, Any]], None], m: int) -> None:
    kernel = CONVOLUTIONS["padded"]
    ast = winograd(kernel, "out", m).ast
    reference = Reference(kernel, computed=ast, sets=Reference(kernel).sets)
    args = whole(make_inputs(kernel, reference.sets[1]))
    change(args[1])
    bound = reference.bounds_of(None)
    [expected] = reference.outputs(args, bound)
    got = evaluate(ast, args, exact=False)[0]
    assert expected.tolerance is not None and np.all(np.abs(got.astype(np.float64) - expected.want) <= expected.tolerance)
