"""16-bit floats: operations of several steps are computed in float32 and rounded once."""
from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from svod.core.ir.dtype import dtypes
from svod.tensor import Tensor
from svod.tensor.precision import rounded, rounds_once, rounds_to_self, widened

HALVES = ("float16", "bfloat16")


class Steps(Tensor):
    """Methods that record the dtypes of their operands."""

    seen: tuple[str, ...] = ()

    @rounds_once
    def mixed(self, x: Operand, number: float, y: Operand | None = None, *rest: Operand) -> Tensor:  # noqa: F821
        Steps.seen = tuple(t.dtype.name for t in (self, x, y, *rest) if isinstance(t, Tensor))
        return self._float()

    @rounds_to_self
    def normed(self, x: Operand) -> Tensor:  # noqa: F821
        return self._float().add(x)


@pytest.mark.parametrize("half", HALVES)
def test_operands_of_16_bits_are_wide_inside_and_results_have_their_common_type(half: str) -> None:
    x, wide, whole = (Steps(Tensor.ones(2, dtype=d)) for d in (half, "float32", "int32"))
    assert x.mixed(x, 0.5, y=x).dtype.name == half and Steps.seen == ("float32",) * 3
    assert x.mixed(whole, 0.5).dtype.name == half and Steps.seen == ("float32", "int32")
    assert whole.mixed(x, 0.5, None).dtype.name == half and Steps.seen == ("int32", "float32")
    assert x.mixed(np.ones(2, np.float32), 0.5).dtype.name == "float32"     # an array is an operand
    assert x.mixed(1.0, 0.5, None, x, wide).dtype.name == "float32" and Steps.seen == ("float32",) * 3
    assert wide.mixed(wide, 0.5).dtype.name == "float32"
    assert x.normed(wide).dtype.name == half and wide.normed(x).dtype.name == "float32" and whole.normed(x).dtype.name == "float32"


def test_both_ends_keep_the_form_of_what_they_are_given() -> None:
    half, whole = Tensor.ones(2, dtype="float16"), Tensor.ones(2, dtype="int32")
    made = widened([half, (whole, {"a": half}), 3, None])
    assert made[0].dtype == made[1][1]["a"].dtype == dtypes.float32 and made[1][0] is whole and made[2:] == [3, None]
    found = rounded(half.sort(), dtypes.bfloat16)
    assert found.values.dtype == dtypes.bfloat16 and found.indices.dtype == dtypes.int64


def _half(values: Any, dtype: str = "float16") -> Tensor:
    return Tensor(np.array(values, np.float32), dtype=dtype)


def test_a_bias_is_added_before_a_product_is_rounded() -> None:
    assert _half([[256, 256]]).linear(_half([[129, 129]]), _half([-2000])).item() == 64064
    assert _half([[[100], [.31]]]).conv1d(_half([[[10], [1]]]), _half([-1000])).item() == np.float16(0.31)
    assert _half([[[100], [.31]]]).conv_transpose1d(_half([[[10]], [[1]]]), _half([-1000])).item() == np.float16(0.31)
    assert _half([[100, 3.1]], "bfloat16").linear(_half([[10, 1]], "bfloat16"), _half([-1000], "bfloat16")).item() == 3.09375


def test_factors_are_applied_before_a_product_is_rounded() -> None:
    a, b = _half([[300, 300]]), _half([[300], [300]])
    assert _half([[1]]).addmm(a, b, alpha=0.001).item() == 181
    assert _half([60000]).add(_half([60000]), alpha=-0.9).item() == 6000
    assert _half([-60000]).index_add(0, [0], _half([60000]), alpha=1.5).item() == 30000


def test_numbers_take_the_type_of_a_tensor_in_one_step_as_in_numpy() -> None:
    x = np.array([1.0, 2.0], np.float16)
    with np.errstate(over="ignore"):
        np.testing.assert_array_equal((Tensor(x) * 1e9).numpy(), x * np.float16(1e9))
    assert (Tensor(x) + 0.1).numpy()[0] == x[0] + np.float16(0.1)
