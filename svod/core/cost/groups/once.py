"""Finds values that several stages of a phase compute, so that each is computed once by a thread that has all its positions side by side.

    softmax of 1024 columns, GROUP(s1.r0, 256) UNROLL(s1.r0, 0) GROUP(s3.r0, 256) UNROLL(s3.r0, 0) LOCAL(o1, 256) UPCAST(o1, 0)
        s1 = max x;  s3 = Σ exp(x - s1);  y = exp(x - s1) / s3
        each thread loads four elements of x and computes four exponentials, not twelve and eight
"""
from __future__ import annotations

from collections.abc import Hashable

from svod.core.cost.groups.stage_shape import Run, StageShape, steps_of
from svod.core.kernel.kernel import LinearIndex, Node
from svod.core.machine.levels import MemorySpace


class OnceInPhase:
    """The values that the stages of a phase have computed so far. Stages with serial loops in a thread are left out."""

    def __init__(self) -> None:
        self._numbers: dict[Hashable, int] = {}         # identity of a value → its number
        self._known: set[int] = set()

    def known(self, shape: StageShape) -> set[int]:
        """The nodes of a stage whose values earlier stages have computed. The values of its other nodes count as computed from now on."""
        if any(run.times > 1 for run in shape.serial) or shape.is_shared_copy or shape.stage.space is MemorySpace.HELD:
            return set()
        nodes, numbers = shape.stage.r.nodes, dict[int, int]()
        for i, n in enumerate(nodes):
            identity = _identity(shape, n, numbers)
            if identity is not None:
                numbers[i] = self._numbers.setdefault(identity, len(self._numbers))
        values = {i: value for i, value in numbers.items() if nodes[i].kind in ("load", "alu", "cast")}
        found = {i for i, value in values.items() if value in self._known}
        self._known.update(values.values())
        return found


def _identity(shape: StageShape, n: Node, numbers: dict[int, int]) -> Hashable | None:
    """The identity of a value: its operation and the numbers of its operands; for a load, the elements that each thread of each group
    loads. None for a value that depends on anything but loads and other stages."""
    if n.kind in ("const", "variable"):
        return n.kind, n.dtype, str(n.arg)
    if n.kind == "load" and n.linear is not None and not n.linear.atoms:
        return "load", n.dtype, n.arg, _places(shape, n.linear)
    if n.kind == "read" and not any(lin.atoms for lin in n.dims):
        return "read", n.dtype, n.arg, tuple([_places(shape, lin) for lin in n.dims])
    if n.kind in ("alu", "cast", "bitcast") and all(s in numbers for s in n.src):
        return n.op, n.dtype, str(n.arg), tuple([numbers[s] for s in n.src])
    return None


def _places(shape: StageShape, linear: LinearIndex) -> Hashable:
    """The elements that an access touches: its steps along threads, along positions side by side and along the grid. The order of the last
    two does not matter."""
    def moving(runs: list[Run]) -> list[tuple[int, int]]:
        return [step for step in steps_of(runs, linear.coefs) if step[0] and step[1] > 1]
    return linear.const, tuple(moving(shape.threads)), _in_order(moving(shape.expanded)), _in_order(moving(shape.grid))


def _in_order(steps: list[tuple[int, int]]) -> tuple[tuple[int, int], ...]:
    """Sort loops by their steps, and merge two loops if one continues where the other ends."""
    out = list[tuple[int, int]]()
    for step, count in sorted(steps):
        if out and step == out[-1][0] * out[-1][1]:
            out[-1] = out[-1][0], out[-1][1] * count
        else:
            out.append((step, count))
    return tuple(out)
