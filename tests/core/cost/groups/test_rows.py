"""Rows in registers: what the heuristic takes for softmax and norms, and what it costs that stages compute alike."""
from __future__ import annotations

from collections.abc import Callable
from math import prod

import pytest

from svod.core.cost.groups.group_cost import group_cost
from svod.core.cost.groups.group_sketch import group_heuristic
from svod.core.kernel.apply import apply_opts
from svod.core.kernel.chain_text import parse_chain
from svod.core.kernel.kernel import Kernel
from svod.core.kernel.loop_nest import loop_nest
from svod.core.kernel.scheduler import LOOP, Scheduler
from svod.nn.functional import layer_norm
from svod.tensor import Tensor
from tests.core.corpus import data, kernel_of
from tests.core.cost.groups.test_group_cost import GPU
from tests.draws import a_half
from tests.growth import check_growth

ROWS: dict[str, Callable[[Tensor], Tensor]] = {
    "softmax": lambda x: x.softmax(-1), "layer norm": lambda x: layer_norm(x, (x.shape[-1],)),
    "RMS norm": lambda x: x / ((x * x).mean(-1, keepdim=True) + 1e-5).sqrt()}


def state_of(name: str, rows: int, columns: int) -> Scheduler:
    return Scheduler(Kernel(kernel_of(ROWS[name](data(rows, columns)))), GPU)


@pytest.mark.parametrize("name", a_half(ROWS))
@pytest.mark.parametrize("shape", [(4096, 1024), (4096, 1023), (1 << 18, 3), (1 << 18, 16)])
def test_the_heuristic_holds_rows(name: str, shape: tuple[int, int]) -> None:
    """A thread has no loops over a row. What it loads counts once, so the traffic is one read and one write."""
    state = group_heuristic(state_of(name, *shape))
    nest = loop_nest(state).stages
    left = [p for s in nest for axis, loops in zip(nest[s].r.axes, nest[s].axes, strict=True) for p in loops
            if p.role == LOOP and p.extent > 1 and state.kernel.axes[axis].extent == shape[1]]
    assert not left
    assert group_cost(state).bytes_moved == pytest.approx(8 * prod(shape), rel=0.01)


def test_what_is_computed_alike_costs_once() -> None:
    """Exponentials of both stages at the same positions; not where their threads have others."""
    base = state_of("softmax", 4096, 1024)

    def cycles(chain: str) -> float:
        return group_cost(apply_opts(base, parse_chain(chain))).cycles
    shared = "GROUP(s1.r0, 256) UNROLL(s1.r0, 0) GROUP(s3.r0, 256) UNROLL(s3.r0, 0)"
    alike, other = cycles(f"{shared} LOCAL(o1, 256) UPCAST(o1, 0)"), cycles(f"{shared} UPCAST(o1, 4) LOCAL(o1, 256)")
    assert alike < 0.95 * other, "threads that store four neighbours have reduced others"


def test_values_that_are_read_twice_are_looked_at_once() -> None:
    """Squares, each of the one before: as a tree they would be 2ⁿ loads."""
    def run(squares: int) -> None:
        x = data(8)
        for _ in range(squares):
            x = x * x
        group_heuristic(Scheduler(Kernel(kernel_of(x)), GPU))
    check_growth(run)


def test_what_the_second_cache_keeps_is_loaded_once() -> None:
    """Rows that are read by three stages: once from memory where the rows of all groups at a time fit the cache, else by each stage."""
    few, many = "UPCAST(s1.r0, 4) GROUP(s1.r0, 1024) GROUP(s3.r0, 1024) UPCAST(o1, 4) LOCAL(o1, 1024)", \
        "UPCAST(s1.r0, 4) GROUP(s1.r0, 64) GROUP(s3.r0, 64) UPCAST(o1, 4) LOCAL(o1, 64)"
    base = state_of("softmax", 2048, 32768)
    traffic = [group_cost(apply_opts(base, parse_chain(chain))).bytes_moved / (4 * 2048 * 32768) for chain in (few, many)]
    assert traffic[0] == pytest.approx(2, rel=0.01) and traffic[1] == pytest.approx(4, rel=0.01)
    assert any(o.op == "GROUP" and o.arg >= 512 for o in group_heuristic(base).applied_opts)
