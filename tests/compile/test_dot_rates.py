"""What dot instructions cost here: the loops that are timed compute what they say, and the figure is one that ranking can use."""
from __future__ import annotations

import pickle

import numpy as np
import pytest

from svod.compile.dot_rates import ACCUMULATORS, measured_cost, turns
from svod.compile.host import host_target, make_target
from svod.compile.linear import interpret, validate
from svod.core.dots import DOTS
from svod.core.dtype import dtypes, to_numpy

TARGET = make_target("x86_64", "znver5", ("avx2", "avx512f", "bf16", "fma", "sse4", "vnni"), (48 << 10, 1 << 20, 32 << 20), 4)
HERE = [name for name, dot in DOTS.items() if not dot.is_tile and dot.runs_on(host_target())]


def test_the_loop_of_multiply_adds() -> None:
    x = np.linspace(0, 1, 16, dtype=np.float32)
    got = x.copy()
    program = turns(TARGET, dtypes.float32, None, 7)
    validate(program)
    interpret(program, [got])
    np.testing.assert_allclose(got, sum(range(ACCUMULATORS)) + ACCUMULATORS * 7 * x.astype(np.float64) ** 2, rtol=1e-4)


@pytest.mark.parametrize("name", ["vnni8", "vnni16"])
def test_the_loop_of_an_instruction(name: str) -> None:
    dot = DOTS[name]
    x = np.random.default_rng(3).integers(0, 100, 16 * dot.group).astype(to_numpy(dot.operands[0]))
    got = x.copy()
    program = turns(TARGET, dot.operands[0], dot, 7)
    validate(program)
    interpret(program, [got])
    groups = (x.astype(np.int64).reshape(16, dot.group) ** 2).sum(1)
    np.testing.assert_array_equal(got.view(np.int32), sum(range(ACCUMULATORS)) + ACCUMULATORS * 7 * groups)


@pytest.mark.parametrize("name", HERE)
def test_a_measured_cost_is_a_power_of_two(name: str) -> None:
    cost = measured_cost(name)
    assert cost in (0.5, 1.0, 2.0, 4.0, 8.0, 16.0) and measured_cost(name) == cost
    assert DOTS[name].cost(host_target()) == cost


def test_what_was_measured_is_no_part_of_the_identity() -> None:
    here, travelled = host_target(), pickle.loads(pickle.dumps(host_target()))
    assert travelled == here and hash(travelled) == hash(here) and travelled.key == here.key
    assert "dot_cost" not in repr(here) and "dot_cost" not in here.key
    assert all(d.cost(here) == d.base_cost for d in DOTS.values() if d.is_tile), "tiles cost what their cycles say"
