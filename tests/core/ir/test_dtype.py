"""Conversions between element types that round nothing."""
from __future__ import annotations

import numpy as np

from svod.core.ir.dtype import STORABLE, dtypes, holds, to_numpy
from svod.core.kernel.kernel import Kernel
from tests.core.corpus import data, kernel_of


def test_a_type_holds_another_if_conversions_to_it_are_exact() -> None:
    """NumPy agrees, but for integers of 64 bits, which it converts to float64 as if that were exact. It has no bfloat16."""
    for wide in STORABLE:
        for narrow in STORABLE:
            if dtypes.bfloat16 in (wide, narrow):
                held, holding = (dtypes.bool, dtypes.int8, dtypes.uint8), (dtypes.float32, dtypes.float64)
                assert holds(wide, narrow) == (wide is narrow or narrow in held if wide is dtypes.bfloat16
                                               else wide in holding)
            else:
                rounds = wide.is_float and narrow.is_int and narrow.bits == 64
                assert holds(wide, narrow) == (np.can_cast(to_numpy(narrow), to_numpy(wide)) and not rounds), (wide, narrow)


def test_an_exact_conversion_before_another_is_no_operation() -> None:
    """Bytes as bfloat16 numbers are bytes: a product in float32 converts them once. A conversion that rounds stays."""
    def conversions(between: str, dtype: str = "int8") -> int:
        kernel = Kernel(kernel_of(data(3, 40) @ data(40, 5, dtype=dtype).cast(between).cast("float32")))
        resolved = kernel.resolve(frozenset(range(kernel.output)))[kernel.output]
        assert resolved is not None
        return sum(n.kind == "cast" for n in resolved.nodes)
    assert conversions("bfloat16") == conversions("float16") == conversions("int32") == 1
    assert conversions("bfloat16", "int16") == conversions("int8", "int16") == 2
