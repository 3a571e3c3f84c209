"""Prices tiles that a subgroup holds: products, reads of operands, and registers.

    4 × 4 tiles of mma_bf16, operands in shared memory       per 16 of the sum: 16 products, 4 + 4 reads of lines of 16 bytes
"""
from __future__ import annotations

from typing import NamedTuple

from svod.core.cost.footprint import bank_turns
from svod.core.kernel.group_memory.banks import MATRIX, is_turned
from svod.core.kernel.intrinsics import TensorizePlan
from svod.core.kernel.layout import Layout
from svod.core.machine.isa import Dot, Fragment

REGISTER_BYTES = 4      # bytes of a register


class HeldTiles(NamedTuple):
    """The tiles of a stage that a subgroup holds."""

    plan: TensorizePlan
    results: Fragment
    operands: tuple[Fragment, ...]      # empty if the instruction reads its operands from shared memory

    @property
    def dot(self) -> Dot:
        return self.plan.dot

    @property
    def products(self) -> float:
        """Multiply-adds of one instruction, per thread."""
        return self.dot.rows * self.dot.columns * self.dot.positions / self.dot.threads

    def number(self, node: int) -> int:
        """The number of the operand that a node is, or -1."""
        return next((k for k, o in enumerate(self.plan.operands) if o.node == node), -1)

    def words(self, number: int) -> float:
        """Registers of a thread for a tile of an operand; also the number of loads that read it from memory."""
        return self.operands[number].num_elements * self.dot.operands[number].itemsize / REGISTER_BYTES if self.operands else 0.0

    def registers(self, positions: list[int]) -> float:
        """Registers of a thread for the operands of its tiles. `positions`: the number of tiles along each axis of the stage."""
        return positions[self.plan.rows] * self.words(0) + positions[self.plan.columns] * self.words(1)

    def reads(self, number: int, layout: Layout) -> float:
        """Instructions of a thread to read a tile of an operand from shared memory."""
        return self.words(number) if is_turned(layout, self.dot.operands[number].itemsize, self.plan.packed[number].dim) else 1.0

    def tile_bytes(self, number: int) -> int:
        return self.operands[number].num_elements * self.dot.threads * self.dot.operands[number].itemsize

    @property
    def shared_bytes(self) -> int:
        """Bytes that one instruction itself reads from shared memory; 0 if threads load its operands."""
        dot = self.dot
        return (dot.rows + dot.columns) * dot.positions * dot.operands[0].itemsize if dot.reads_shared else 0

    def turns(self, number: int, layout: Layout) -> float:
        """Turns that shared memory takes to read a tile: one for each matrix of eight lines, more with bank conflicts."""
        lines, nbytes = MATRIX
        size = self.dot.operands[number].itemsize
        if layout.swizzle is not None:
            return self.words(number)
        step = layout.strides[layout.order[-2]] * size if len(layout.order) > 1 else nbytes
        if is_turned(layout, size, self.plan.packed[number].dim):
            return self.words(number) * bank_turns(((step, nbytes // size), (size, lines)), self.dot.threads, size)
        return self.words(number) * bank_turns(((step, lines),), lines, nbytes)


def held_tiles(plan: TensorizePlan | None) -> HeldTiles | None:
    """The tiles of a stage, if a subgroup holds them; else None."""
    if plan is None or plan.dot.fragments is None:
        return None
    results, *operands = plan.dot.fragments
    return HeldTiles(plan, results, tuple(operands))
