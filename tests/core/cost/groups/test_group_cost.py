"""Preferences of the cost model for groups that hold for every such device."""
from __future__ import annotations

from dataclasses import replace

import pytest

from svod.compile.lower.lower import lower
from svod.core.cost.groups.device import device_of, resident_groups
from svod.core.cost.groups.group_cost import group_cost, phase_pricers
from svod.core.cost.groups.group_sketch import group_heuristic, group_sketches
from svod.core.cost.work import AccessKind
from svod.core.kernel.apply import apply_opts
from svod.core.kernel.chain_text import parse_chain
from svod.core.kernel.groups import most_threads
from svod.core.kernel.kernel import Kernel
from svod.core.kernel.placement import place_stages
from svod.core.kernel.scheduler import Opt, Scheduler
from svod.core.machine.target import Target
from svod.errors import KernelOptError
from svod.tensor import Tensor
from svod.tune.search.actions import default_actions
from tests.core.corpus import CORPUS, conv, data, kernel_of
from tests.draws import an_eighth
from tests.toy_backend.target import TOY

GPU = Target(arch="test", cpu="test", features=(), vector_bytes=16, vector_registers=128, l1=128 << 10, l2=40 << 20, l3=0, threads=1,
             has_non_temporal=False, group_threads=1024, shared_bytes=48 << 10, subgroup=32, units=108, registers_per_thread=255,
             group_registers=65536, unit_threads=2048, unit_groups=32, unit_shared_bytes=160 << 10, device="TEST")
IMAGE = 2       # the argument of a convolution that is not its weights or result


def cycles(tensor: Tensor, *chain: tuple[str, str, int | str], target: Target = GPU) -> float:
    return group_cost(apply_opts(Scheduler(Kernel(kernel_of(tensor)), target), [Opt(*o) for o in chain])).cycles


def test_neighbouring_threads_read_neighbouring_elements() -> None:
    x = data(2048, 2048) + data(2048, 1)
    assert cycles(x, ("LOCAL", "o1", 256)) < cycles(x, ("LOCAL", "o0", 256)) / 2


def test_a_sum_along_memory_wants_threads_along_memory() -> None:
    x = data(4096, 4096)
    assert cycles(x.sum(1), ("GROUP", "r0", 256)) < cycles(x.sum(1), ("LOCAL", "o0", 256)) / 4
    columns = cycles(x.sum(0), ("LOCAL", "o0", 64), ("SPLITK", "r0", 64))
    assert columns < cycles(x.sum(0), ("LOCAL", "o0", 64), ("GROUP", "r0", 16)) / 2, "neighbours share a sum: each has a row of its own"
    assert columns < cycles(x.sum(0), ("GROUP", "r0", 16)) / 2


def test_register_tiles_reuse_what_they_read() -> None:
    x = data(1024, 1024) @ data(1024, 1024)
    threads = (("LOCAL", "o0", 16), ("LOCAL", "o1", 16))
    tile = (("UPCAST", "o0", 4), ("UPCAST", "o1", 4))
    assert cycles(x, *tile, *threads) < cycles(x, *threads) / 2
    assert cycles(x, ("UPCAST", "o0", 16), ("UPCAST", "o1", 16), *threads) > cycles(x, *tile, *threads), "too many registers"


@pytest.mark.parametrize("buffers", [2, 4])
@pytest.mark.parametrize("depth", [20, 31, 32, 33, 64])
def test_shared_memory_is_what_the_code_takes(depth: int, buffers: int) -> None:
    """A loop of one whole iteration runs nothing ahead, so its copies have a single buffer."""
    chain = f"LOCAL(o0, 8) LOCAL(o1, 8) TILE(r0, 16) STAGE(s0, r0) STAGE(s1, r0) PIPELINE(r0, {buffers})"
    state = apply_opts(Scheduler(Kernel(kernel_of(data(64, depth) @ data(depth, 64))), TOY), parse_chain(chain))
    assert [p.phase().shared for p in phase_pricers(state)] == [phase.shared_bytes for phase in lower(state).spec.phases]


def test_a_whole_sum_is_shared_by_the_units() -> None:
    x = data(1 << 22).sum()
    assert cycles(x, ("GROUP", "r0", 256), ("SPLITK", "r0", 64)) < cycles(x, ("GROUP", "r0", 256)) / 8


def test_few_threads_of_a_subgroup_waste_the_others() -> None:
    x = data(4096, 4096) * 2.0
    assert cycles(x, ("LOCAL", "o0", 256)) < cycles(x, ("LOCAL", "o0", 4)) / 2


def test_memory_bounds_what_moves_much() -> None:
    x = data(4096, 4096) * 2.0
    best = group_cost(group_heuristic(Scheduler(Kernel(kernel_of(x)), GPU)))
    assert best.bytes_moved == 2 * 4 * 4096 * 4096
    slower = replace(GPU, clock=1e9, memory_rate=108 * 4e9)
    assert cycles(x, ("LOCAL", "o0", 256), target=slower) > 2 * cycles(x, ("LOCAL", "o0", 256))


def test_resident_groups() -> None:
    device = device_of(GPU)
    assert resident_groups(device, 256, 32, 0) == 8, "threads"
    assert resident_groups(device, 256, 128, 0) == 2, "registers"
    assert resident_groups(device, 64, 32, 40 << 10) == 4, "shared memory"
    assert resident_groups(device, 32, 16, 0) == 32, "groups"
    assert resident_groups(device, 32, 80, 0) == 24, "each quarter of the registers has room for 6 warps"
    assert resident_groups(device_of(replace(GPU, group_reserved_bytes=1 << 10)), 64, 32, 40 << 10) == 3, "what a group takes beside"
    assert resident_groups(device, 1024, 255, 1 << 20) == 1


def chain_of(tensor: Tensor) -> set[str]:
    return {o.op for o in group_heuristic(Scheduler(Kernel(kernel_of(tensor)), GPU)).applied_opts}


def test_what_the_heuristic_takes() -> None:
    assert chain_of(data(512, 512) @ data(512, 512)) >= {"UPCAST", "LOCAL", "UNROLL"}
    assert "GROUP" in chain_of(data(512, 4096).sum(1))
    assert {"GROUP", "SPLITK"} <= chain_of(data(1 << 22).sum())
    assert "LOCAL" in chain_of(conv(16, 32, 28, 3, padding=1))
    assert "LOCAL" in chain_of(data(997, 1009).transpose(0, 1).contiguous())


def test_a_transpose_turns_squares_in_registers() -> None:
    """Squares are transposed where vectors divide both axes; a short axis is transposed whole."""
    turned = data(4096, 2048).transpose(0, 1).contiguous()
    chain = [(o.op, o.axis, o.arg) for o in group_heuristic(Scheduler(Kernel(kernel_of(turned)), GPU)).applied_opts]
    assert chain[:3] == [("UPCAST", "o1", 4), ("UPCAST", "o0", 4), ("LOCAL", "o1", 4)], "eight neighbours read four sectors"
    tile = (("UPCAST", "o1", 4), ("UPCAST", "o0", 4))
    assert cycles(turned, *tile, ("LOCAL", "o1", 4), ("LOCAL", "o0", 16)) < cycles(turned, *tile, ("LOCAL", "o1", 8), ("LOCAL", "o0", 8))
    short = data(1 << 22, 3).transpose(0, 1).contiguous()
    assert ("UPCAST", "o0", 0) in [(o.op, o.axis, o.arg) for o in group_heuristic(Scheduler(Kernel(kernel_of(short)), GPU)).applied_opts]


def test_groups_begin_one_after_the_other() -> None:
    """A quarter of a million groups take as long as that, whatever they do."""
    x = data(1 << 18, 16) * 2.0
    many, few = (cycles(x, ("LOCAL", "o0", n)) for n in (16, 256))
    assert many > 1.25 * (1 << 18) > 2 * few


def test_contractions_stage_their_operands_in_shared_memory() -> None:
    x = data(512, 768) @ data(768, 3072)
    assert {"STAGE", "PIPELINE"} <= chain_of(x)
    none = replace(GPU, shared_bytes=0)
    assert "STAGE" not in {o.op for o in group_heuristic(Scheduler(Kernel(kernel_of(x)), none)).applied_opts}


SOFTWARE = replace(GPU, subgroup=0, software_lanes=8, units=2)


def test_a_driver_in_software_pays_for_accesses() -> None:
    """There a register tile gains more than on hardware, and among the sketches are operands in the order in which they are read."""
    x = data(256, 256) @ data(256, 256)
    threads, tile = (("LOCAL", "o0", 8), ("LOCAL", "o1", 8)), (("UPCAST", "o0", 4), ("UPCAST", "o1", 8))

    def gain(target: Target) -> float:
        return cycles(x, *threads, target=target) / cycles(x, *tile, *threads, target=target)
    assert gain(SOFTWARE) > 1.25 * gain(replace(SOFTWARE, software_lanes=0))
    sketches = group_sketches(Scheduler(Kernel(kernel_of(conv(32, 64, 28, 3, padding=1))), SOFTWARE))
    assert any(("STAGE", "root") in {(o.op, o.arg) for o in s.applied_opts} for s in sketches)


def test_a_driver_in_software_reads_the_parts_of_a_shared_sum_one_after_the_other() -> None:
    """By the square of the group, unless threads of a subgroup exchange registers."""
    rows = data(512, 1024).sum(1)
    assert cycles(rows, ("GROUP", "r0", 256), target=SOFTWARE) > 4 * cycles(rows, ("GROUP", "r0", 32), target=SOFTWARE)
    exchanging = replace(SOFTWARE, subgroup=8)
    for threads, gain in ((8, 1.0), (64, 1.5), (256, 3.0)):
        assert cycles(rows, ("GROUP", "r0", threads), target=SOFTWARE) > gain * cycles(rows, ("GROUP", "r0", threads), target=exchanging)
    best = group_heuristic(Scheduler(Kernel(kernel_of(data(512, 1024).softmax(-1))), SOFTWARE))
    assert all(o.arg <= 32 for o in best.applied_opts if o.op == "GROUP")


def test_taps_beside_each_other_share_what_they_read() -> None:
    """Three taps of eight results read ten elements, taps that are apart 24."""
    chain = (("UPCAST", "o2", 8), ("UNROLL", "r2", 0), ("LOCAL", "o0", 64))
    near, apart = (cycles(conv(32, 64, 26 + 2 * d, 3, dilation=d), *chain, target=SOFTWARE) for d in (1, 8))
    assert near < 0.8 * apart


@pytest.mark.parametrize("stride, dilation, loads", [(1, 1, 10), (2, 1, 17), (4, 1, 24), (1, 2, 12), (1, 8, 24)])
def test_elements_of_windows_are_loaded_as_often_as_in_the_code(stride: int, dilation: int, loads: int) -> None:
    """Three taps of eight results, whose images are as large as these windows."""
    kernel = Kernel(kernel_of(conv(2, 4, 7 * stride + 2 * dilation + 1, 3, stride=stride, dilation=dilation)))
    chain = [Opt("UPCAST", "o2", 8), Opt("UPCAST", "o0", 4), Opt("LANES", "o0.in"), Opt("UNROLL", "r2", 0)]
    state = apply_opts(Scheduler(kernel, GPU), chain)
    (counter,) = phase_pricers(state)[0].counters()
    counter.count()
    assert [a.times / counter.body for a in counter.accesses if a.number == IMAGE and a.kind is AccessKind.LOAD] == [loads]
    (code,) = lower(state).code
    assert sum([line[0] == "LOAD" and code[line[3][0]][0] == "ARG" and code[line[3][0]][4] == IMAGE for line in code]) == loads


def test_staged_values_must_fit_shared_memory() -> None:
    chain = (("LOCAL", "o1", 16), ("LOCAL", "o0", 16), ("TILE", "r0", 64), ("STAGE", "s0", "r0"), ("STAGE", "s1", "r0"))
    x = data(512, 768) @ data(768, 3072)
    assert cycles(x, *chain) > 0.0
    with pytest.raises(KernelOptError, match="shared memory"):
        cycles(x, *chain, target=replace(GPU, shared_bytes=4096))


def test_rows_are_fused_into_one_phase_of_a_group_a_row() -> None:
    state = group_heuristic(Scheduler(Kernel(kernel_of(data(4096, 1024).softmax(-1))), GPU))
    assert place_stages(state).roots == (state.kernel.output,)
    assert most_threads(state) >= 32 and {"GROUP", "LOCAL"} <= {o.op for o in state.applied_opts}


def test_a_search_proposes_copies_that_run_ahead() -> None:
    base = Scheduler(Kernel(kernel_of(data(64, 64) @ data(64, 64))), GPU)
    staged = apply_opts(base, [Opt("LOCAL", "o1", 16), Opt("LOCAL", "o0", 16), Opt("TILE", "r0", 16), Opt("STAGE", "s1", "r0")])
    assert not any(o.op == "PIPELINE" for o in default_actions(base, 4))
    assert Opt("PIPELINE", "r0", 2) in default_actions(staged, 4)


@pytest.mark.parametrize("name", an_eighth(CORPUS))
def test_the_heuristic_is_the_best_sketch(name: str) -> None:
    base = Scheduler(Kernel(CORPUS[name]()), GPU)
    found = group_sketches(base)
    best = group_cost(group_heuristic(base)).cycles
    assert best <= 1.02 * min(group_cost(s).cycles for s in found) and best <= group_cost(base).cycles * 1.02
    assert len({s.digest for s in found}) == len(found)
