"""Matrix instructions whose tiles a subgroup holds, as the cost model sees them."""
from __future__ import annotations

from math import prod

import pytest

from svod.core.cost.groups.group_cost import group_cost
from svod.core.cost.groups.group_sketch import group_heuristic
from svod.core.cost.groups.tiles import held_tiles
from svod.core.ir.dtype import DType, dtypes
from svod.core.kernel.apply import apply_opts
from svod.core.kernel.chain_text import parse_chain
from svod.core.kernel.loop_nest import loop_nest
from svod.core.kernel.scheduler import Scheduler
from svod.core.machine.levels import MemorySpace
from tests.compile.cuda.target import card_target
from tests.compile.lower.test_intrinsics import gemm
from tests.draws import a_half

BF16, F16, F32, I8 = dtypes.bfloat16, dtypes.float16, dtypes.float32, dtypes.int8
EXTENT = 1024


def best(arch: str, dtype: DType, tensor_cores: bool = True) -> Scheduler:
    target = card_target(arch).allowing(tensor_cores, True)
    return group_heuristic(Scheduler(gemm(EXTENT, EXTENT, EXTENT, dtype, dtype), target))


@pytest.mark.slow
@pytest.mark.parametrize(("arch", "dtype", "name"), [("sm_75", F16, "mma_f16k8"), ("sm_80", BF16, "mma_bf16"), ("sm_90", I8, "mma_s8"),
                                                     ("sm_75", I8, "mma_s8k16"), ("sm_90a", BF16, "wgmma_bf16n128")])
def test_what_the_instruction_gains(arch: str, dtype: DType, name: str) -> None:
    """Predicted between what tensor cores take alone and a few times that; well below what multiply-adds take."""
    state = best(arch, dtype)
    chosen = state.dots[state.kernel.output]
    assert chosen is not None and chosen.name == name
    nest = loop_nest(state)
    tiles = held_tiles(nest.layouts.dots[state.kernel.output])
    assert tiles is not None
    ideal = EXTENT ** 3 / (tiles.products * 128 / tiles.dot.base_cost * state.target.units)
    assert ideal < group_cost(state).cycles < 6 * ideal
    assert group_cost(state).cycles < group_cost(best(arch, dtype, tensor_cores=False)).cycles / 3
    assert group_cost(state).flops == 2.0 * EXTENT ** 3


@pytest.mark.parametrize(("arch", "dtype"), [("sm_75", BF16), ("sm_80", F32)])
def test_types_without_an_instruction(arch: str, dtype: DType) -> None:
    assert not any(best(arch, dtype).dots)


@pytest.mark.slow
def test_lines_of_operands_lie_in_different_banks() -> None:
    """Rows of 32 or 64 bfloat16 would meet in a few banks: their lines change places."""
    state = best("sm_80", BF16)
    nest = loop_nest(state)
    tiles = held_tiles(nest.layouts.dots[state.kernel.output])
    assert tiles is not None
    for number, operand in enumerate(tiles.plan.operands):
        stage = nest.stages[operand.stage]
        assert stage.space is MemorySpace.SHARED and stage.layout is not None and stage.layout.swizzle is not None
        assert tiles.turns(number, stage.layout) == tiles.words(number)
        assert prod(stage.region) >= tiles.dot.rows * tiles.dot.depth


@pytest.mark.parametrize(("extent", "rows"), a_half([(8192, 8), (1024, 0)]))
def test_large_matrices_are_read_in_squares(extent: int, rows: int) -> None:
    """Groups that run at a time need less of both operands where the second cache holds neither."""
    state = group_heuristic(Scheduler(gemm(extent, extent, extent, BF16, BF16, out=BF16), card_target("sm_90a")))
    chain = state.applied_opts
    assert [o.arg for o in chain if (o.op, o.axis) == ("TILE", "o0")] == [rows] * (rows > 0)
    if rows:
        others = apply_opts(Scheduler(state.kernel, state.target), [o for o in chain if (o.op, o.axis) != ("TILE", "o0")])
        assert group_cost(state).bytes_moved < 0.8 * group_cost(others).bytes_moved


def test_what_groups_do_alone_is_added_for_each_round() -> None:
    """With few steps of the sum, groups of which a unit runs several at a time are faster than one that is as large as those together."""
    def cycles(k: int, chain: str) -> float:
        state = Scheduler(gemm(8192, 1024, k, BF16, BF16, transposed=True, out=BF16), card_target("sm_90a"))
        return group_cost(apply_opts(state, parse_chain(chain))).cycles
    staged = "STAGE(s0, r0) STAGE(s1, r0) UNROLL(r0.in2, 0) PIPELINE(r0, 4)"
    large, small = (f"TC(r0, wgmma_bf16n{n},o0,o1) {parts}(o0, 2) TILE(r0, 4) {staged}" for n, parts in ((256, "LOCAL"), (128, "UPCAST")))
    assert cycles(4096, large) < cycles(4096, small)
    assert cycles(128, large) / cycles(128, small) > cycles(4096, large) / cycles(4096, small)
