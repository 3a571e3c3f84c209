"""Kernels of models with one operation changed: verification finds every change whose effect exceeds rounding errors."""
from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest

from svod.core.ir.uop import TRANSCENDENTAL, Ops, UOp
from svod.core.kernel.kernel import Kernel
from svod.core.spec.evaluate import evaluate
from svod.core.spec.values import to_float
from svod.tune.measure.verify import GuardedBuffers, Reference, verify, whole
from tests.core.corpus import CORPUS
from tests.draws import a_half
from tests.tune.measure.test_undecidable import contracted, program
from tests.tune.search_kernels import load

CHANGED = 0.02          # change relative to an element and to the largest one; bfloat16 and long sums round by less
EXCHANGED = {Ops.ADD: Ops.SUB, Ops.SUB: Ops.ADD, Ops.MAX: Ops.MIN, Ops.MIN: Ops.MAX}
IDENTITIES = {"ADD": 0.0, "MUL": 1.0, "MAX": -np.inf, "MIN": np.inf}


def changes_of(u: UOp) -> Iterator[UOp]:
    """Nodes that a faulty compiler might put in the place of `node`."""
    if u.op is Ops.LOAD and len(u.src) == 1 and u.src[0].src[0].arg.size > 1:
        p, flat = u.src[0].src
        yield load(p, (flat + 1) % p.arg.size)                      # a neighbour
        yield load(p, flat.alu(Ops.MIN, p.arg.size - 2))            # the last element is left out
    if not u.dtype.is_float:
        return
    if u.op in EXCHANGED:
        yield UOp(EXCHANGED[u.op], u.dtype, u.src)
    elif u.op is Ops.WHERE:
        yield UOp(Ops.WHERE, u.dtype, (u.src[0], u.src[2], u.src[1]))
    elif u.op is Ops.CONST and np.isfinite(u.arg):
        yield UOp.const(u.dtype, u.arg * 1.25)
    elif u.op in TRANSCENDENTAL | {Ops.SQRT, Ops.FDIV, Ops.RECIPROCAL, Ops.MUL}:
        yield u * 1.25
    elif u.op is Ops.REDUCE and u.arg[1] == 1:
        value, *ranges = u.src
        n = int(ranges[-1].src[0].arg)
        short = (ranges[-1] < n - 1).alu(Ops.WHERE, value, UOp.const(u.dtype, IDENTITIES[u.arg[0]]))
        yield UOp(Ops.REDUCE, u.dtype, (short, *ranges), u.arg)     # the last step is left out
        yield UOp(Ops.REDUCE, u.dtype, u.src, ("MAX" if u.arg[0] == "MIN" else "MIN", 1))


def mutants(ast: UOp) -> Iterator[UOp]:
    for u in ast.toposort():
        for changed in changes_of(u):
            yield ast.substitute({u: changed})


def is_another(k: Kernel, mutant: UOp, reference: Reference) -> bool:
    """Whether a mutant's results, in float64, differ from the kernel's by far more than rounding, for some of the compared inputs."""
    for number in range(len(reference.sets)):
        args = whole(reference.given(number))
        for slot, mine, right in zip(sorted(set(k.outs)), evaluate(mutant, args), evaluate(k.ast, args), strict=True):
            a, b = (to_float(x, k.params[slot].dtype).astype(np.float64) for x in (mine, right))
            numbers = np.isfinite(b) & (np.abs(b) > CHANGED * np.max(np.abs(b), where=np.isfinite(b), initial=0.0))
            if np.any(~np.isfinite(a[numbers]) | (np.abs(a - b) > CHANGED * np.abs(b))[numbers]):
                return True
    return False


@pytest.mark.parametrize("name", a_half(sorted(CORPUS)))
def test_a_changed_operation_is_found(name: str) -> None:
    k = Kernel(CORPUS[name]())
    reference = Reference(k)
    assert verify(reference, program(k, contracted(k.ast)), GuardedBuffers(k)).right
    found = 0
    for mutant in mutants(k.ast):
        result = verify(reference, program(k, mutant), GuardedBuffers(k))
        if is_another(k, mutant, reference):
            assert result.right is False, f"{mutant}"
            found += 1
    assert found
