"""The checks of kernels written by hand: they access only elements of their parameters and write each element once. The checks are compared
with counting, and errors are tested."""
from __future__ import annotations

import itertools
import random
from collections import Counter

import pytest

from svod.core.ir import symbolic as sy
from svod.core.ir.dtype import dtypes
from svod.core.ir.uop import Ops, UOp
from svod.core.schedule.call_checks import check_accesses, reached_elements, writes_once
from svod.errors import ScheduleError
from tests.hand_kernels import HAND, Ast, inside, number

N = 8


def parts_of(rng: random.Random, ranges: list[UOp]) -> UOp:
    """Make a random sum of ranges, their quotients and remainders."""
    total = number(rng.randint(-3, 3))
    for r in ranges:
        for _ in range(rng.choice([1, 1, 2])):
            part = rng.choice([r, sy.floordiv(r, a := rng.randint(1, 6)), sy.floormod(r, a),
                               sy.floormod(sy.floordiv(r, a), rng.randint(1, 4))])
            total = sy.add(total, sy.scale(part, rng.choice([-1, 1]) * rng.choice([1, 2, 3, 4, 6, 12, 24, 36])))
    return total


def drawn(rng: random.Random) -> list[UOp]:
    return [sy.make_range(rng.randint(1, 9), axis) for axis in range(rng.randint(1, 3))]


def values_at(exprs: tuple[UOp, ...], ranges: list[UOp]) -> list[tuple[int, ...]]:
    return [tuple(int(sy.simplify(e, at).arg) for e in exprs)
            for point in itertools.product(*(range(sy.extent_of(r)) for r in ranges))
            for at in [{r: number(v) for r, v in zip(ranges, point, strict=True)}]]


def test_nothing_is_said_to_be_written_once_that_is_not() -> None:
    rng = random.Random(5)
    found: Counter[tuple[bool, bool]] = Counter()
    for _ in range(200):
        ranges = drawn(rng)
        index = parts_of(rng, ranges)
        numbers = values_at((index,), ranges)
        found[writes_once(index, tuple(ranges)), len(set(numbers)) == len(numbers)] += 1
    assert not found[True, False] and found[True, True] > 3 * found[False, True] and found[False, False]


def test_what_a_gate_lets_through_is_within_what_is_said() -> None:
    rng = random.Random(6)
    tighter = 0
    for _ in range(120):
        ranges = drawn(rng)
        index = parts_of(rng, ranges)
        gate, tested = sy.TRUE, []
        for _ in range(rng.randint(1, 2)):
            tested.append(expr := rng.choice([index, sy.add(ranges[0], ranges[-1]), ranges[0], sy.floordiv(ranges[-1], 2)]))
            gate = gate & inside(expr, low := rng.randint(-2, 4), low + rng.randint(1, 6)) if rng.randrange(2) else gate & (expr < low * 2)
        reached = reached_elements(index, sy.simplify(gate))
        open_at = [i for i, g in values_at((index, gate), ranges) if g]
        assert not open_at or (reached is not None and reached[0] <= min(open_at) and max(open_at) <= reached[1])
        tighter += reached is None or reached != sy.bounds(index)
    assert tighter > 40


def test_what_kernels_of_tensors_do_is_taken() -> None:
    """Kernels of Tensor operations pass the checks, except for indices from memory without a gate that bounds them."""
    for name in sorted(HAND.keys() - {"gathered_stage"}):
        check_accesses(HAND[name](), "")
    with pytest.raises(ScheduleError, match="reads a STAGE at -2147483648 to 2147483647"):
        check_accesses(HAND["gathered_stage"](), "")


def kernel(at: UOp | None = None, *, gate: UOp | None = None, shift: int = 0, dtype: str = "float32", extent: int = N) -> UOp:
    """Make a kernel y[at] = x[r + shift] under a gate; r is the first range, and `at` is r by default."""
    k = Ast()
    y, x = k.param(0, N), k.param(1, N)
    r, = k.axes(extent)
    return k.sink(k.store(y, r if at is None else at, k.load(x, r + shift, gate).cast(getattr(dtypes, dtype)), r))


R, R9 = Ast().axes(N)[0], Ast().axes(N + 1)[0]
REFUSED = {
    "a gate that does not bound": (kernel(gate=R < N, shift=10**8), "elements 100000000 to 100000007 of slot 1"),
    "a gate too far": (kernel(gate=inside(R + 3, 0, N + 1), shift=3), r"elements 3 to 8 of slot 1, .*as far as its gate shows"),
    "a gate of one of two": (kernel(gate=UOp(Ops.OR, dtypes.bool, (R < 2, R < 4)), shift=1), "elements 1 to 8"),
    "one element": (kernel(number(0)), "may write an element of slot 0 for several values of its RANGEs"),
    "remainder": (kernel(R % 4), "may write an element of slot 0 for several"),
    "quotient": (kernel(R.alu(Ops.IDIV, number(2))), "may write an element of slot 0 for several"),
    "clamped": (kernel(R9.alu(Ops.MIN, number(N - 1)), gate=R9 < N, extent=N + 1), "may write an element of slot 0 for several"),
    "no bounds": (kernel(R.alu(Ops.IDIV, R)), "an index of .* has no bounds"),
    "another dtype": (kernel(dtype="float64"), "STORE of float64 where slot 0 is of float32"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_accesses_that_are_refused(name: str) -> None:
    ast, said = REFUSED[name]
    with pytest.raises(ScheduleError, match=said):
        check_accesses(ast, "")


def test_a_library_kernel_has_room_for_what_it_reads_and_writes() -> None:
    def sorting(out: int, given: int) -> UOp:
        k = Ast()
        y, x = k.param(0, out, dtypes.int64), k.param(1, given)
        return k.sink(k.store(y, number(0), UOp(Ops.CUSTOM_FUNCTION, dtypes.int64, (x,), ("ARGSORT", (False,), ((2, 5),)))))
    check_accesses(sorting(10, 10), "")
    for sizes, slot in (((9, 10), 0), ((10, 9), 1)):
        with pytest.raises(ScheduleError, match=f"ARGSORT of .2, 5., reaches 10 elements of slot {slot}, which has 9"):
            check_accesses(sorting(*sizes), "")


def test_accesses_that_are_taken() -> None:
    for ast in (kernel(gate=inside(R + 3, 0, N), shift=3), kernel(gate=UOp.const(dtypes.bool, False), shift=10**8),
                kernel(R * -1 + (N - 1)), kernel((R % 4) * 2 + R.alu(Ops.IDIV, number(4)))):
        check_accesses(ast, "")
