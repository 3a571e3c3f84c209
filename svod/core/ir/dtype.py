"""Element types and the one promotion rule.

Promotion (`promote`): bool < unsigned/signed integers < floats. Two integers of the same signedness give the wider; signed with unsigned
gives the narrowest signed type that holds both (uint64 with a signed type gives float64, as NumPy does); a float with anything not float
keeps the float; two floats give the wider, float16 with bfloat16 gives float32. A Python scalar never widens a tensor of its own kind:
`int8 + 1` is int8, `int8 + 1.0` is the default float (float32).
"""
from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np


@dataclass(frozen=True, eq=False)
class DType:
    """An element type. There is one object for each name, so equality is identity. `kind`: 'b' (bool), 'u' (unsigned), 'i' (signed) or
    'f' (float); `bits`: its width."""

    name: str
    kind: str
    bits: int

    @property
    def itemsize(self) -> int:
        """Bytes of one element in memory (bool takes one byte)."""
        return max(1, self.bits // 8)

    @property
    def is_float(self) -> bool:
        return self.kind == "f"

    @property
    def is_int(self) -> bool:
        return self.kind in "iu"

    @property
    def is_signed(self) -> bool:
        return self.kind in "if"

    @property
    def min(self) -> int | float:
        """Smallest value; -inf for floats."""
        if self.kind == "f":
            return -float("inf")
        return -(1 << (self.bits - 1)) if self.kind == "i" else 0

    @property
    def max(self) -> int | float:
        """Largest value; inf for floats."""
        if self.kind == "f":
            return float("inf")
        if self.kind == "b":
            return 1
        return (1 << (self.bits - 1)) - 1 if self.kind == "i" else (1 << self.bits) - 1

    def __repr__(self) -> str:
        return f"dtypes.{self.name}"

    def __reduce__(self) -> tuple[Any, ...]:
        return to_dtype, (self.name,)   # pickled by name, so that each process keeps one object for each name


class dtypes:
    """The element types by name. `index` is the 64-bit integer type of index arithmetic; no buffer has it."""

    bool = DType("bool", "b", 1)
    int8, int16, int32, int64 = (DType(f"int{b}", "i", b) for b in (8, 16, 32, 64))
    uint8, uint16, uint32, uint64 = (DType(f"uint{b}", "u", b) for b in (8, 16, 32, 64))
    float16, float32, float64 = (DType(f"float{b}", "f", b) for b in (16, 32, 64))
    bfloat16 = DType("bfloat16", "f", 16)
    index = DType("index", "i", 64)
    void = DType("void", "v", 0)

    default_float = float32
    default_int = int32


STORABLE: tuple[DType, ...] = (
    dtypes.bool, dtypes.int8, dtypes.int16, dtypes.int32, dtypes.int64,
    dtypes.uint8, dtypes.uint16, dtypes.uint32, dtypes.uint64,
    dtypes.float16, dtypes.bfloat16, dtypes.float32, dtypes.float64,
)
BY_NAME: dict[str, DType] = {d.name: d for d in (*STORABLE, dtypes.index, dtypes.void)}


def to_dtype(value: object) -> DType:
    """Convert a DType, a name ('float32'), a NumPy dtype, or a PyTorch dtype of the same name to a DType. Raises TypeError for any other
    value."""
    if isinstance(value, DType):
        return value
    if isinstance(value, np.dtype) and value in _OF_NUMPY:
        return _OF_NUMPY[value]
    if isinstance(value, str) and value in BY_NAME:
        return BY_NAME[value]
    try:
        name = "" if value is None else np.dtype(value).name  # type: ignore[call-overload]     # None is float64 to NumPy
    except TypeError:
        name = ""
    if not name and type(value).__module__ == "torch":
        name = str(value).removeprefix("torch.")
    if name in BY_NAME:
        return BY_NAME[name]
    raise TypeError(f"{value!r} is not a dtype svod knows; use one of {', '.join(d.name for d in STORABLE)}")


def is_dtype_name(name: str) -> bool:
    """Whether a string is the name of a svod dtype, or NumPy's name of one."""
    try:
        to_dtype(name)
    except TypeError:
        return False
    return True


_NUMPY = {d: np.dtype(np.uint16 if d is dtypes.bfloat16 else "int64" if d is dtypes.index else d.name) for d in (*STORABLE, dtypes.index)}
_OF_NUMPY = {n: d for d, n in _NUMPY.items() if d not in (dtypes.bfloat16, dtypes.index)}


def to_numpy(dtype: DType) -> np.dtype:
    """Return the NumPy dtype in which elements of `dtype` are stored. NumPy has no bfloat16: such elements are the uint16 of their bits."""
    return _NUMPY[dtype]


def promote(a: DType, b: DType) -> DType:
    """Return the common type of two operands by the promotion rule in the docstring of this module."""
    if a == b:
        return a
    if a.is_float or b.is_float:
        if not (a.is_float and b.is_float):
            return a if a.is_float else b
        if a.bits == b.bits:
            return dtypes.float32
        return a if a.bits > b.bits else b
    if a.kind == "b" or b.kind == "b":
        return b if a.kind == "b" else a
    if a.kind == b.kind:
        return a if a.bits > b.bits else b
    signed, unsigned = (a, b) if a.kind == "i" else (b, a)
    if signed.bits > unsigned.bits:
        return signed
    return dtypes.float64 if unsigned.bits == 64 else BY_NAME[f"int{unsigned.bits * 2}"]


_EXACT_BITS = {dtypes.float16: 11, dtypes.bfloat16: 8, dtypes.float32: 24, dtypes.float64: 53}     # an integer of so many bits is exact


def holds(wide: DType, narrow: DType) -> bool:
    """Whether every value of `narrow` is a value of `wide`, so that a conversion rounds nothing."""
    if wide == narrow or narrow.kind == "b":
        return True
    if narrow.is_float:
        return wide.is_float and wide.bits > narrow.bits
    if wide.is_float:
        return narrow.bits - narrow.is_signed <= _EXACT_BITS[wide]
    return wide.is_int and wide.min <= narrow.min and narrow.max <= wide.max


def accumulator(dtype: DType) -> DType:
    """Return the type in which sums and products of `dtype` are accumulated: float32 for 16-bit floats, int32 or uint32 for narrow
    integers, int32 for bool, otherwise `dtype`."""
    if dtype.is_float:
        return dtypes.float32 if dtype.bits < 32 else dtype
    if dtype.kind == "b":
        return dtypes.int32
    if dtype.bits < 32:
        return dtypes.int32 if dtype.kind == "i" else dtypes.uint32
    return dtype
