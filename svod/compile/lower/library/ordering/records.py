"""Records: what sorting networks order for each element of a row, as one vector or two.

    of SORT                 the key
    of ARGSORT and TOPK     the key above the position in one integer, if both have room in 32 or 64 bits; otherwise the key, the position

Records of a row differ if they have positions, so an order of records is stable.
"""
from __future__ import annotations

from svod.compile.lower.library.loops import Loops
from svod.compile.lower.library.ordering.counting import type_to_compare
from svod.compile.lower.library.ordering.keys import CONSTANT_BITS, element_of, key_type, sort_key
from svod.core.ir.dtype import BY_NAME, DType, dtypes
from svod.core.ir.uop import UOp
from svod.core.machine.target import Target

Record = tuple[int, ...]        # values, vectors of as many lanes


def position_bits(n: int) -> int:
    """Return the bits of the positions of a row."""
    return (n - 1).bit_length()


def record_types(node: UOp) -> tuple[DType, ...]:
    """Return the types of the parts of a record."""
    dtype, (_, n) = node.src[0].dtype, node.arg[2][0]
    kind = key_type(dtype)
    if node.arg[0] == "SORT":
        return (type_to_compare(kind),)
    bits = kind.bits - CONSTANT_BITS.get(dtype.name, 0) + position_bits(n)
    if bits > 64:
        return kind, BY_NAME[f"int{kind.bits}"]
    return (BY_NAME[f"{'int' if kind.kind == 'i' else 'uint'}{32 if bits <= 32 else 64}"],)


class Records:
    """Emits the records of the operand of a library kernel, and stores the results of them. `kept`: the results of a row."""

    def __init__(self, b: Loops, node: UOp, target: Target, descending: bool) -> None:
        self.b, self.descending, self.types = b, descending, record_types(node)
        self.y, self.x = b.args(node)
        self.lanes = target.lanes(self.types[0])
        self.has_positions = node.arg[0] != "SORT"
        self.bits = position_bits(node.arg[2][0][1])

    def _bitwise(self, op: str, v: int, constant: int) -> int:
        lanes = self.b.num_lanes[v]
        return self.b.alu(op, self.types[0], lanes, v, self.b.const(self.types[0], lanes, constant))

    def keys(self, at: int, lanes: int, mask: int | None = None) -> int:
        """Load elements from `at` on, as the part of their records that has the key."""
        b, dtype = self.b, self.b.dtype[self.x]
        key = b.cast(self.types[0], sort_key(b, b.get(self.x, at, lanes, mask=mask), self.descending, one_zero=self.has_positions))
        if not self.has_positions or len(self.types) > 1:
            return key
        constant = CONSTANT_BITS.get(dtype.name, 0)
        return self._bitwise("SHL", self._bitwise("SHR", key, constant) if constant else key, self.bits)

    def record(self, keys: int, position: int, step: int) -> Record:
        """Return the records of some keys: those of the elements at `position`, or, with a step of 1, from it on."""
        b, kind, lanes = self.b, self.types[-1], self.b.num_lanes[keys]
        if not self.has_positions:
            return (keys,)
        positions = b.splat(b.cast(kind, position), lanes)
        if step and lanes > 1:
            positions = b.alu("ADD", kind, lanes, positions, b.vconst(kind, tuple(range(lanes))))
        return (b.alu("OR", kind, lanes, keys, positions),) if len(self.types) == 1 else (keys, positions)

    def last(self, lanes: int) -> Record:
        """Return records that come behind all others."""
        return tuple([self.b.const(t, lanes, t.max) for t in self.types])

    def result(self, record: Record) -> int:
        """Return the part of records from which results are made."""
        return record[-1]

    def put(self, at: int, part: int, mask: int | None = None) -> None:
        """Store the results of records from `at` on, of which `part` is given."""
        b, dtype = self.b, self.b.dtype[self.y]
        if not self.has_positions:
            value = element_of(b, b.cast(key_type(dtype), part), dtype, self.descending)
        elif len(self.types) == 1:
            value = b.cast(dtype, self._bitwise("AND", part, (1 << self.bits) - 1))
        else:
            value = b.cast(dtype, part)
        b.put(self.y, at, value, mask)


def ordered(b: Loops, x: Record, y: Record) -> tuple[Record, Record]:
    """Return (the first ones of two records, the others), lane by lane."""
    lanes = b.num_lanes[x[0]]
    if len(x) == 1:
        low, high = (b.alu(op, b.dtype[x[0]], lanes, *x, *y) for op in ("MIN", "MAX"))
        return (low,), (high,)
    less, equal, before = (b.alu(op, dtypes.bool, lanes, q, p) for op, q, p in (
        ("CMPLT", y[0], x[0]), ("CMPEQ", y[0], x[0]), ("CMPLT", y[1], x[1])))
    swaps = b.either(less, b.both(equal, before))
    pairs = [(b.choose(swaps, q, p), b.choose(swaps, p, q)) for p, q in zip(x, y, strict=True)]
    return tuple([low for low, _ in pairs]), tuple([high for _, high in pairs])
