"""Sketches: all are legal and correct; contractions get register tiles, rows get vectors, and large kernels get several cores."""
from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import replace
from math import prod

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from svod.compile.lower.linear import validate
from svod.compile.lower.lower import lower
from svod.core.cost import sketch
from svod.core.cost.cpu import cost_of
from svod.core.cost.runs import stage_runs
from svod.core.cost.sketch import TIE_FACTOR, heuristic, sketches
from svod.core.cost.sketch_facts import lane_amounts, tile_amounts
from svod.core.cost.sketch_tiles import HARDLY_FILLED
from svod.core.ir.uop import Ops
from svod.core.kernel.apply import algorithm_of, apply_opts
from svod.core.kernel.kernel import Kernel
from svod.core.kernel.loop_nest import loop_nest
from svod.core.kernel.placement import place_stages
from svod.core.kernel.scheduler import LOOP, ROOT, UPCAST, Opt, Scheduler
from svod.core.machine.isa import DOTS
from svod.core.machine.target import Target
from svod.core.tree.passes import loop_tree
from svod.tensor import Tensor
from tests.agreement import Case, has_native, run_interpreted, run_native, steps
from tests.chain_runs import KERNELS, case_of
from tests.compile.native import AVX2, AVX512, BASELINE, runnable_targets
from tests.core.corpus import conv, data, kernel_of
from tests.draws import a_half, an_eighth, draws
from tests.hand_kernels import gemm, lines, row_sums, softmax
from tests.tensor.strategies import make, seeds

NATIVE = [replace(t, threads=4) for t in runnable_targets().values()]
TARGETS = [replace(t, threads=4) for t in (BASELINE, AVX2, AVX512)]
TARGET = TARGETS[-1]
MOST_STEPS = 25_000     # instructions that the interpreter runs for a sketch; each kernel has sketches with fewer
SKETCHES = 4        # number of sketches of a kernel that are run for each target and in each way


STATISTICS = {"rows": (2,), "columns": (1,), "images": (0,), "a row of each": (1, 2), "all rows": (0, 2), "all images": (0, 1)}


@pytest.mark.parametrize("axes", STATISTICS.values(), ids=STATISTICS)
@pytest.mark.parametrize("shape", [(4, 50, 64), (2, 33, 70), (1, 128, 200), (7, 96, 5), (6, 1, 2052), (1, 5, 4104), (3, 13, 2000)], ids=str)
def test_statistics_are_computed_once(shape: tuple[int, int, int], axes: tuple[int, ...]) -> None:
    """The heuristic computes means and variances along any axes at most twice for each result, also where cores share a loop."""
    x = data(*shape).gelu()
    centred = x - x.mean(axes, keepdim=True)
    kernel = Kernel(kernel_of(centred / ((centred * centred).mean(axes, keepdim=True) + 1e-3).sqrt()))
    for target in TARGETS:
        state = heuristic(Scheduler(kernel, target))
        runs = stage_runs(kernel, loop_nest(state).stages, loop_tree(state))
        for s in kernel.stages:
            if s.has_reduce and not s.is_output:
                results = prod([kernel.axes[a].extent for a in s.outs])
                computed = runs[s.index].times * prod(runs[s.index].nest.region)
                assert computed <= 2 * max(results, target.threads), f"{s.name} of {state}: {computed:g} results for {results}"


@pytest.mark.parametrize("axis", [0, 1, 2])
def test_sums_of_exponentials_run_in_vectors(axis: int) -> None:
    """Two elementwise values are before the sum, one of which reads the other: the maximum is subtracted, then the exponential taken."""
    x = data(16, 155, 32)
    for result in (x.log_softmax(axis), x + x.logsumexp(axis, keepdim=True)):
        kernel = Kernel(kernel_of(result))
        for target in TARGETS:
            state = heuristic(Scheduler(kernel, target))
            tiled = {state.stage_of_row(i) for i, row in enumerate(state.rows) if row.role == UPCAST}
            assert tiled.issuperset(s.index for s in kernel.stages if s.has_reduce), str(state)


def _halves(x: Tensor) -> Tensor:
    return Tensor.cat([x[..., ::2] * x[..., 1::2].sigmoid(), x[..., 1::2]], -1)


def _mixed(x: Tensor) -> Tensor:
    """Half of each row and half of the row before it."""
    return x * 0.5 + x.pad([(0, 0), (1, 0), (0, 0)])[:, :-1] * 0.5


SCATTERED: dict[str, Callable[[Tensor], Tensor]] = {
    "halves of pairs, mixed": lambda x: _mixed(_halves(x)), "mixed, then halves of pairs": lambda x: _halves(_mixed(x)).exp(),
    "every third": lambda x: (x[..., ::3] * x[..., 1::3] + x[..., 2::3]).tanh(),
    "backwards": lambda x: x.flip(2).exp() + x.flip(2).sqrt(), "pairs turned": lambda x: x[..., ::2].sin() * x[..., 1::2].cos()}


@pytest.mark.parametrize("width", [6, 66, 192])
@pytest.mark.parametrize("build", SCATTERED.values(), ids=SCATTERED)
def test_arithmetic_on_scattered_elements_runs_in_vectors(build: Callable[[Tensor], Tensor], width: int) -> None:
    """Arithmetic gains by vectors even where most loads gain nothing."""
    kernel = Kernel(kernel_of(build(data(4, 50, width))))
    for target in TARGETS:
        state = heuristic(Scheduler(kernel, target))
        assert loop_nest(state).stages[kernel.output].vector >= 0, str(state)


def _forces(bodies: int, dims: int) -> Tensor:
    """The sums of all pairs' forces, as an n-body program writes them."""
    places, masses = data(bodies, dims), data(bodies)
    apart = places.unsqueeze(0) - places.unsqueeze(1)
    squares = (apart * apart).sum(-1) + 1
    return (apart * (masses * squares.rsqrt() / squares).unsqueeze(-1)).sum(1)


@pytest.mark.parametrize(("bodies", "dims"), [(64, 3), (50, 2), (257, 5)])
def test_a_reduction_of_few_elements_is_not_the_vector(bodies: int, dims: int) -> None:
    """The square roots and divisions of pairs are computed in vectors of pairs, although the accesses of the distance are contiguous
    along the few dimensions that are summed."""
    kernel = Kernel(kernel_of(_forces(bodies, dims)))
    for target in TARGETS[1:]:
        state = heuristic(Scheduler(kernel, target))
        nests = loop_nest(state).stages
        [inner] = [s for s in kernel.stages if s.has_reduce and not s.is_output]
        assert 0 <= nests[inner.index].vector < len(inner.outs), str(state)


@draws(6)
@given(bodies=st.sampled_from([1, 2, 7, 16, 33, 50]), dims=st.sampled_from([1, 2, 3, 5]), seed=seeds)
def test_forces_are_right(bodies: int, dims: int, seed: int) -> None:
    case = Case(Kernel(kernel_of(_forces(bodies, dims))), seed)
    for target in NATIVE:
        run_native(case, lower(heuristic(Scheduler(case.kernel, target))), target, 2)


def _depthwise(x: Tensor, dilation: int = 1) -> Tensor:
    channels = x.shape[1]
    return x.conv2d(data(channels, 1, 3, 3), groups=channels, padding=dilation, dilation=dilation)


WINDOWS: dict[str, Callable[[Tensor], Tensor]] = {
    "dilated": lambda x: _depthwise(x, 2), "in three dimensions": lambda x: x.unsqueeze(0).max_pool3d(5, 1, padding=2),
    "of many elements": lambda x: x.max_pool2d(7, 1, padding=3), "of costly values": lambda x: x.exp().avg_pool2d(3, 1, padding=1)}


@pytest.mark.parametrize("build", [*WINDOWS.values()][:3], ids=[*WINDOWS][:3])
def test_rows_of_overlapping_windows_share_loads(build: Callable[[Tensor], Tensor]) -> None:
    """Several rows are computed side by side, also where windows are dilated, or too large to become straight-line code as a whole."""
    kernel = Kernel(kernel_of(build(data(1, 8, 24, 40))))
    for target in TARGETS[1:]:
        state = heuristic(Scheduler(kernel, target))
        r = loop_nest(state).stages[kernel.output]
        beside = [p for a in range(len(r.r.stage.outs)) if a != r.vector for p in r.axes[a] if p.role == UPCAST]
        assert prod([p.extent for p in beside]) > 1, str(state)


def test_windows_of_costly_values_read_a_copy() -> None:
    kernel = Kernel(kernel_of(WINDOWS["of costly values"](data(1, 8, 24, 40))))
    for target in TARGETS:
        state = heuristic(Scheduler(kernel, target))
        assert any(state.place[s.index] != "inline" for s in kernel.stages if not s.is_output), str(state)


@pytest.mark.parametrize(("rows", "columns"), [(16, 1568), (32, 48), (50, 100)])
def test_a_value_per_row_turns_no_tiles(rows: int, columns: int) -> None:
    """What is contiguous along the rows alone needs no transposition: vectors run along the columns, one row at a time."""
    for value in ((data(rows, 1) + data(rows, 1) * data(rows, columns)).sigmoid(), data(rows, 1) + data(rows, columns)):
        kernel = Kernel(kernel_of(value))
        for target in TARGETS:
            state = heuristic(Scheduler(kernel, target))
            assert {kernel.axes[row.axis].name for row in state.rows if row.role == UPCAST} == {"o1"}, str(state)


@pytest.mark.parametrize("shape", [(2, 32, 924), (2, 64, 1881), (3, 24, 100)], ids=str)
def test_rows_that_share_a_statistic_come_one_by_one(shape: tuple[int, int, int]) -> None:
    """Several rows side by side hide the latency of their own sums; a sum over all rows gains nothing by them."""
    x = data(*shape)
    kernel = Kernel(kernel_of(x / ((x * x).mean(1, keepdim=True) + 1e-5).sqrt()))
    for target in TARGETS:
        state = heuristic(Scheduler(kernel, target))
        assert not any(row.role == UPCAST and kernel.axes[row.axis].name == "o1" for row in state.rows), str(state)


@pytest.mark.parametrize(("rows", "width"), [(56, 40), (28, 40)])
def test_short_rows_of_windows_are_read_in_place(rows: int, width: int) -> None:
    """Windows read a short copy while it is on its way to the cache, and wait for it."""
    kernel = Kernel(kernel_of(data(1, 48, rows, width).avg_pool2d(3, 2, padding=1)))
    state = heuristic(Scheduler(kernel, replace(AVX512, threads=1)))
    assert all(state.place[s.index] == "inline" for s in kernel.stages if not s.is_output), str(state)


def _products(width: int, columns: int, rows: int = 1, along: int = -1) -> Tensor:
    """For each of `rows` rows of costly values, the product with a matrix of its own, whose sums run along the axis `along`."""
    costly, matrices = data(rows, width).exp().log1p().tanh(), data(*((rows, columns, width) if along == -1 else (rows, width, columns)))
    return ((costly.unsqueeze(1) if along == -1 else costly.unsqueeze(2)) * matrices).sum(along)


@pytest.mark.parametrize(("width", "columns", "rows", "along", "is_kept"), [
    (512, 2048, 1, -1, True), (768, 300, 1, -1, True), (100, 1025, 1, -1, True), (330, 301, 4, -1, True), (330, 301, 4, 1, True),
    (512, 3, 1, -1, False), (512, 3, 1, 1, False)])
def test_costly_values_that_many_sums_read_are_computed_once(width: int, columns: int, rows: int, along: int, is_kept: bool) -> None:
    kernel = Kernel(kernel_of(_products(width, columns, rows, along)))
    for target in TARGETS:
        state = heuristic(Scheduler(kernel, target))
        costly = [s for s in kernel.stages if not s.is_output and any(u.op is Ops.EXP for u in s.value.toposort())]
        assert [state.place[s.index] != "inline" for s in costly] == [is_kept], str(state)


@draws(6)
@given(width=st.sampled_from([1, 7, 50, 130]), columns=st.sampled_from([1, 2, 16, 33]), rows=st.sampled_from([1, 3]),
       along=st.sampled_from([-1, 1]), seed=seeds)
def test_products_of_costly_rows_are_right(width: int, columns: int, rows: int, along: int, seed: int) -> None:
    case = Case(Kernel(kernel_of(_products(width, columns, rows, along))), seed)
    for target in NATIVE:
        run_native(case, lower(heuristic(Scheduler(case.kernel, target))), target, 2)


def _distances(rows: int, width: int) -> Tensor:
    """Squared distances between rows of costly values, which two conversions read."""
    costly = data(rows, width).exp().tanh().cast("bfloat16")
    return (costly.unsqueeze(1).cast("float32") - costly.cast("float32")).square().sum(-1)


@pytest.mark.parametrize(("rows", "width"), [(880, 2), (880, 16), (37, 3), (300, 130)])
def test_costly_values_of_pairs_are_computed_once(rows: int, width: int) -> None:
    kernel = Kernel(kernel_of(_distances(rows, width)))
    [costly] = [s for s in kernel.stages if len([q for q in kernel.stages if s.index in kernel.reads[q.index]]) == 2]
    for target in TARGETS:
        state = heuristic(Scheduler(kernel, target))
        assert state.place[costly.index] == ROOT, str(state)


def _farthest(rows: int, width: int) -> Tensor:
    """For each row of costly values, its squared distance to the farthest other row."""
    costly = data(rows, width).exp().tanh()
    return (costly.unsqueeze(1) - costly).square().sum(-1).max(-1)


@pytest.mark.parametrize(("rows", "width"), [(141, 141), (37, 3), (300, 130)])
def test_costly_values_that_sums_inside_another_reduction_read_are_computed_once(rows: int, width: int) -> None:
    kernel = Kernel(kernel_of(_farthest(rows, width)))
    [costly] = [s for s in kernel.stages if not s.is_output and not s.has_reduce]
    for target in TARGETS:
        state = heuristic(Scheduler(kernel, target))
        assert state.place[costly.index] == ROOT, str(state)


@draws(6)
@given(distances=st.sampled_from([_distances, _farthest]), rows=st.sampled_from([1, 7, 33, 130]), width=st.sampled_from([1, 2, 17]),
       seed=seeds)
def test_distances_of_costly_rows_are_right(distances: Callable[[int, int], Tensor], rows: int, width: int, seed: int) -> None:
    case = Case(Kernel(kernel_of(distances(rows, width))), seed)
    for target in NATIVE:
        run_native(case, lower(heuristic(Scheduler(case.kernel, target))), target, 2)


def _gram(batches: int, rows: int, width: int) -> Tensor:
    """For each batch, the products of all pairs of rows of values that are sums of three loads."""
    x = data(batches, rows, width + 2)
    smooth = x[..., 2:] + x[..., 1:-1] * 0.5 + x[..., :-2]
    return smooth @ smooth.transpose(1, 2)


@pytest.mark.parametrize(("batches", "rows", "width"), [(1, 112, 867), (1, 300, 301), (4, 640, 901), (1000, 32, 200)])
def test_a_value_that_is_both_factors_of_a_product_is_computed_once(batches: int, rows: int, width: int) -> None:
    kernel = Kernel(kernel_of(_gram(batches, rows, width)))
    [computed] = [s.index for s in kernel.stages if not s.has_reduce and not s.is_output]
    for target in TARGETS:
        state = heuristic(Scheduler(kernel, target))
        region, place = loop_nest(state).stages[computed].region, state.place[computed]
        around = state.rows[place].extent if isinstance(place, int) else 1
        assert prod(region) * around == batches * rows * width, str(state)


@draws(6)
@given(batches=st.sampled_from([1, 3]), rows=st.sampled_from([1, 7, 33, 130]), width=st.sampled_from([1, 2, 17, 301]), seed=seeds)
def test_products_of_a_value_with_itself_are_right(batches: int, rows: int, width: int, seed: int) -> None:
    case = Case(Kernel(kernel_of(_gram(batches, rows, width))), seed)
    for target in NATIVE:
        run_native(case, lower(heuristic(Scheduler(case.kernel, target))), target, 2)


def _blended(rows: int, channels: int, columns: int) -> Tensor:
    """Neighbours weighted by channel, standardised over channels, with the values themselves added: mean, squares and result read them."""
    x, weight = data(rows, channels, 2 * columns), data(channels, 1)
    blended = x[..., ::2] * weight + x[..., 1::2]
    centred = blended - blended.mean(1, keepdim=True)
    return blended + centred / ((centred * centred).mean(1, keepdim=True) + 1e-3).sqrt()


@pytest.mark.parametrize("of_each", [False, True], ids=["mean", "deviation"])
@pytest.mark.parametrize(("rows", "width"), [(2, 58368), (3, 1025), (48, 640)])
def test_a_division_of_a_row_makes_none_of_its_values_costly(rows: int, width: int, of_each: bool) -> None:
    """Values less the mean of their row are computed again where they are read; values divided by the row's deviation are kept."""
    x = data(rows, width)
    centred = x - x.mean(-1, keepdim=True)
    values = centred / centred.square().mean(-1, keepdim=True).sqrt() if of_each else centred
    kernel = Kernel(kernel_of(values * values.square().mean(-1, keepdim=True)))
    [read] = [s for s in kernel.stages if not s.has_reduce and not s.is_output and len(s.outs) == 2
              and len([q for q in kernel.stages if s.index in kernel.reads[q.index]]) >= 2][-1:]
    for target in TARGETS:
        state = heuristic(Scheduler(kernel, target))
        assert (state.place[read.index] != "inline") == of_each, str(state)


@pytest.mark.parametrize(("rows", "channels", "columns"), [(4, 80, 304), (2, 33, 70), (1, 128, 1031)])
def test_values_of_several_loads_are_computed_once_for_all_readers(rows: int, channels: int, columns: int) -> None:
    kernel = Kernel(kernel_of(_blended(rows, channels, columns)))
    [blended] = [s for s in kernel.stages if len([q for q in kernel.stages if s.index in kernel.reads[q.index]]) == 3]
    for target in TARGETS:
        state = heuristic(Scheduler(kernel, target))
        assert state.place[blended.index] != "inline", str(state)


@draws(6)
@given(rows=st.integers(1, 4), channels=st.sampled_from([1, 2, 7, 33, 80]), columns=st.sampled_from([1, 5, 16, 67]), seed=seeds)
def test_blended_values_are_right(rows: int, channels: int, columns: int, seed: int) -> None:
    case = Case(Kernel(kernel_of(_blended(rows, channels, columns))), seed)
    for target in NATIVE:
        run_native(case, lower(heuristic(Scheduler(case.kernel, target))), target, 2)


def _attention(queries: int, keys: int, width: int) -> Tensor:
    """Attention whose operands are rounded to a grid, as after quantisation."""
    q, k, v = (((data(2, n, width) * 20).round().clamp(-127, 127)) * 0.05 for n in (queries, keys, keys))
    return (q @ k.transpose(1, 2)).softmax(-1) @ v


@pytest.mark.parametrize(("queries", "keys", "width"), [(40, 70, 32), (400, 400, 64), (7, 130, 16)])
def test_products_inside_a_nest_read_copies_of_computed_operands(queries: int, keys: int, width: int) -> None:
    kernel = Kernel(kernel_of(_attention(queries, keys, width)))
    for target in TARGETS:
        state = heuristic(Scheduler(kernel, target))
        [scores] = [s for s in kernel.stages if s.has_reduce and not s.is_output and len(kernel.reads[s.index]) == 2]
        assert all(state.place[operand] != "inline" for operand in kernel.reads[scores.index]), str(state)


@draws(6)
@given(queries=st.sampled_from([1, 7, 33]), keys=st.sampled_from([1, 2, 13, 50]), width=st.sampled_from([1, 5, 16, 31]), seed=seeds)
def test_attention_of_computed_operands_is_right(queries: int, keys: int, width: int, seed: int) -> None:
    case = Case(Kernel(kernel_of(_attention(queries, keys, width))), seed)
    for target in NATIVE:
        run_native(case, lower(heuristic(Scheduler(case.kernel, target))), target, 2)


@draws(6)
@given(name=st.sampled_from(sorted(WINDOWS)), rows=st.sampled_from([1, 2, 7, 13]), width=st.sampled_from([1, 3, 17, 31]), seed=seeds)
def test_overlapping_windows_are_right(name: str, rows: int, width: int, seed: int) -> None:
    case = Case(Kernel(kernel_of(WINDOWS[name](data(1, 3, rows, width)))), seed)
    for target in NATIVE:
        run_native(case, lower(heuristic(Scheduler(case.kernel, target))), target, 2)


@draws(10)
@given(name=st.sampled_from(sorted(SCATTERED)), rows=st.sampled_from([1, 2, 7, 33]), width=st.sampled_from([6, 18, 30, 66]), seed=seeds)
def test_arithmetic_on_scattered_elements_is_right(name: str, rows: int, width: int, seed: int) -> None:
    case = Case(Kernel(kernel_of(SCATTERED[name](data(2, rows, width)))), seed)
    for target in NATIVE:
        run_native(case, lower(heuristic(Scheduler(case.kernel, target))), target, 2)


@draws(10)
@given(shape=st.tuples(*[st.sampled_from([1, 2, 3, 5, 7, 16, 33, 50])] * 3), axes=st.sampled_from(list(STATISTICS.values())), seed=seeds)
def test_statistics_are_right(shape: tuple[int, int, int], axes: tuple[int, ...], seed: int) -> None:
    a = make(shape, "float32", seed)
    x = Tensor(a)
    centred, exact = x - x.mean(axes, keepdim=True), a.astype(np.float64) - a.mean(axes, keepdims=True, dtype=np.float64)
    found = centred / ((centred * centred).mean(axes, keepdim=True) + 1e-3).sqrt()
    np.testing.assert_allclose(found.numpy(), exact / np.sqrt((exact * exact).mean(axes, keepdims=True) + 1e-3), rtol=1e-4, atol=1e-4)


@pytest.mark.slow
@pytest.mark.parametrize("number", range(len(KERNELS)), ids=list(KERNELS))
def test_every_sketch_is_correct(number: int) -> None:
    """Each sketch is well-formed for all targets. Some give correct results as machine code for a target that the host can run, and as
    interpreted LINEAR for one of the targets in turn."""
    name = list(KERNELS)[number]
    case, rng = case_of(name), random.Random(name)
    done: set[tuple[str, str]] = set()      # how a program ran, and its digest, which several targets may share
    for target in TARGETS:
        found = sketches(Scheduler(case.kernel, target))
        assert found, "at least the untouched kernel"
        assert len({s.digest for s in found}) == len(found)
        programs = [lower(state) for state in found]
        for program in programs:
            validate(program)
        if target == TARGETS[number % len(TARGETS)]:
            short = [p for p in programs if steps(p) <= MOST_STEPS]
            for program in rng.sample(short, min(SKETCHES, len(short))):
                run_interpreted(case, program, 2)
                done.add(("interpreted", program.digest))
        if target in NATIVE and has_native(case, target) and target.vector_bytes == NATIVE[0].vector_bytes:
            for program in rng.sample(programs, min(SKETCHES, len(programs))):
                if ("native", program.digest) not in done:
                    run_native(case, program, target, 2)
                    done.add(("native", program.digest))
    assert any(how == "interpreted" for how, _ in done), "every kernel has a short sketch"


@pytest.mark.parametrize("name", an_eighth(KERNELS))
def test_the_heuristic_is_one_of_the_cheapest_sketches_with_the_fewest_phases_and_opts(name: str) -> None:
    start = Scheduler(case_of(name).kernel, TARGET)
    best = heuristic(start)
    found = sketches(start)
    near = [s for s in found if cost_of(s).cycles <= TIE_FACTOR * min(cost_of(s).cycles for s in found)]
    assert best.digest in {s.digest for s in near}
    ranks = {s.digest: (len(place_stages(s).roots), len(s.applied_opts)) for s in near}
    assert ranks[best.digest] == min(ranks.values())
    assert apply_opts(start, best.applied_opts).digest == best.digest


def test_contractions_get_a_register_tile() -> None:
    state = heuristic(Scheduler(Kernel(gemm(256, 256, 256)), TARGET))
    tile = [r.extent for r in state.rows if r.role != LOOP and state.kernel.axes[r.axis].kind == "o"]
    assert len(tile) == 2 and max(tile) % 16 == 0
    assert cost_of(state).accumulators >= 8 and state.thread is not None


def test_rows_get_vectors_and_large_work_gets_cores() -> None:
    rows = heuristic(Scheduler(Kernel(softmax(512, 1000)), TARGET))
    assert {state.axis for state in rows.applied_opts if state.op == "UPCAST"} >= {"o1", "s1.r0", "s3.r0"}
    assert rows.thread is not None
    assert heuristic(Scheduler(Kernel(lines(1 << 22)), TARGET)).thread is not None
    assert heuristic(Scheduler(Kernel(lines(100)), TARGET)).thread is None


@pytest.mark.parametrize("seed", a_half(range(2)))
def test_rows_of_windows_that_a_few_vectors_hold_are_computed_whole(seed: int) -> None:
    """No copy of the input is made, as the masks along a whole row are constants. Results are compared with NumPy at random extents."""
    pool = heuristic(Scheduler(Kernel(kernel_of(data(1, 64, 112, 112).max_pool2d(3, stride=2, padding=1))), TARGET))
    assert 56 in [o.arg for o in pool.applied_opts if o.op == "UPCAST"] and not any(o.op == "STAGE" for o in pool.applied_opts)
    rng = random.Random(seed)
    target = replace(NATIVE[-1] if NATIVE else TARGET, threads=2)
    for _ in range(2):
        size, stride = rng.choice((17, 29, 40, 56)), rng.choice((1, 2))
        case = Case(Kernel(kernel_of(data(rng.choice((1, 3, 5)), 2, size, size).max_pool2d(3, stride=stride, padding=1))))
        row = (size - 1) // stride + 1
        whole = [s for s in sketches(Scheduler(case.kernel, target)) if [o.arg for o in s.applied_opts if o.op == "UPCAST"][1:] == [row]]
        assert whole and all(o.op != "STAGE" for s in whole for o in s.applied_opts)
        for state in whole:
            (run_native(case, lower(state), target, 2) if NATIVE else run_interpreted(case, lower(state), 2))


@pytest.mark.parametrize("window", [3, 5])
def test_short_rows_of_windows_have_vectors_along_the_outputs(window: int) -> None:
    """Every second position of rows of 7: the columns of a window are contiguous in memory, but they fill a vector less than a row does."""
    kernel = Kernel(kernel_of(data(1, 64, 14, 14).conv2d(data(64, 1, window, window), stride=2, padding=window // 2, groups=64)))
    best = heuristic(Scheduler(kernel, TARGET))
    assert ("UPCAST", "o2", 7) in [(o.op, o.axis, o.arg) for o in best.applied_opts]


@pytest.mark.parametrize("taps", [16, 17, 31, 64])
def test_windows_longer_than_a_vector_have_vectors_along_the_outputs(taps: int) -> None:
    """Both the columns of a window and the results of a row are contiguous; sums along vectors of results need no sum of a vector."""
    target, rng = replace(NATIVE[-1] if NATIVE else TARGET, threads=2), random.Random(taps)
    rows, row = rng.choice((1, 2, 7)), rng.choice((29, 64, 101))
    case = Case(Kernel(kernel_of(data(1, 3, rows + 2, row + taps - 1).conv2d(data(3, 1, 3, taps), groups=3))))
    state = heuristic(Scheduler(case.kernel, target))
    assert [o.axis for o in state.applied_opts if o.op == "UPCAST"][-1].startswith("o"), state.applied_opts
    (run_native(case, lower(state), target, 2) if NATIVE else run_interpreted(case, lower(state), 2))


@pytest.mark.parametrize("size", [2, 14, 62, 134])
def test_small_windows_that_do_not_overlap_are_straight_line_code(size: int) -> None:
    """Both axes of a window are unrolled, not only its columns."""
    case = Case(Kernel(kernel_of(data(1, 3, size, size).max_pool2d(2))))
    state = heuristic(Scheduler(case.kernel, replace(NATIVE[-1] if NATIVE else TARGET, threads=2)))
    if size > 2:
        assert {o.axis for o in state.applied_opts if o.op == "UNROLL"} == {"r0", "r1"}
    (run_native(case, lower(state), NATIVE[-1], 2) if NATIVE else run_interpreted(case, lower(state), 2))


@pytest.mark.parametrize(("rows", "row"), [(1, 37), (5, 64), (3, 1009)])
def test_rows_less_a_mean_that_another_kernel_made_get_vectors(rows: int, row: int) -> None:
    """The squared value is a row of the input minus one element of another array; it still is contiguous along the row, so it is
    vectorised."""
    x = data(rows, row) - data(rows, 1)
    case = Case(Kernel(kernel_of(data(rows, row) * (x * x).sum(1, keepdim=True))))
    state = heuristic(Scheduler(case.kernel, replace(NATIVE[-1] if NATIVE else TARGET, threads=2)))
    assert any(o.op == "UPCAST" and o.axis.endswith(".r0") for o in state.applied_opts)
    (run_native(case, lower(state), NATIVE[-1], 2) if NATIVE else run_interpreted(case, lower(state), 2))


@pytest.mark.parametrize("seed", a_half(range(2)))
def test_windows_are_copied_by_each_core(seed: int) -> None:
    """Each core copies a part of the rows, in one phase. Inside a part, short tiles follow each other along memory, long ones across it.
    Results are compared with NumPy at random extents."""
    two = replace(TARGET, threads=2)
    large = Scheduler(Kernel(kernel_of(conv(64, 64, 56, 3, padding=1))), two)
    parts = [s for s in sketches(large) if any(o.op == "TILE" for o in s.applied_opts)]
    orders = {tuple(o.arg) for s in parts for o in s.applied_opts if o.op == "ORDER" and "o1.in" in o.arg}
    assert {("o1", "o0", "o1.in", "o2"), ("o1", "o0", "o2", "o1.in")} <= orders
    direct = [s for s in sketches(large) if not algorithm_of(s.applied_opts)]
    assert "TILE" in {o.op for o in min(direct, key=lambda s: cost_of(s).cycles).applied_opts}
    rng = random.Random(seed)
    target = replace(NATIVE[-1] if NATIVE else TARGET, threads=2)
    out = 0
    while out < 4:
        sizes = rng.choice((1, 3, 5)), rng.choice((7, 16, 33)), rng.choice((8, 11, 13, 17)), rng.choice((2, 3, 5))
        case = Case(Kernel(kernel_of(conv(*sizes, padding=1, stride=rng.choice((1, 2))))))
        for state in sketches(Scheduler(case.kernel, target)):
            if any(o.op == "TILE" for o in state.applied_opts):
                (run_native(case, lower(state), target, 2) if NATIVE else run_interpreted(case, lower(state), 2))
                out += 1


@pytest.mark.parametrize("seed", a_half(range(2)))
def test_large_packed_constants_are_asked_for_ahead(seed: int) -> None:
    """Weights that take more than half of L2 and are read as vectors are prefetched, a quarter of L1 ahead. Results equal the evaluator's
    at random extents."""
    def hints(kernel: Kernel, target: Target) -> list[Opt]:
        return [o for o in heuristic(Scheduler(kernel, target)).applied_opts if o.op == "PREFETCH"]

    large, small = (Kernel(gemm(64, 256, depth, constant=True)) for depth in (1024, 64))
    assert hints(large, TARGET) == [Opt("PREFETCH", "s1", 32)], "8 KB: two rows of 32 elements 32 times"
    assert not hints(small, TARGET) and not hints(Kernel(gemm(64, 256, 1024)), TARGET)
    rng, target = random.Random(seed), replace(NATIVE[-1] if NATIVE else TARGET, threads=2, l2=1 << 12)
    out = 0
    for shape in ((1, 64, 37), (7, 1, 41), *((rng.randint(2, 40), rng.choice((17, 31, 64)), rng.randint(29, 90)) for _ in range(6))):
        case = Case(Kernel(gemm(*shape, constant=True)))
        for state in sketches(Scheduler(case.kernel, target)):
            if any(o.op == "PREFETCH" for o in state.applied_opts):
                (run_native(case, lower(state), target, 2) if NATIVE else run_interpreted(case, lower(state), 2))
                out += 1
    assert out >= 8


@pytest.mark.parametrize("threads", (1, 2, 4))
def test_small_convolutions_have_sketches(threads: int) -> None:
    """There are sketches even if the tiles that use the multipliers best leave some cores without windows."""
    for made in (data(2, 4, 9).conv1d(data(6, 4, 3)), data(1, 2, 5, 4, 6).conv3d(data(3, 2, 3, 3, 3))):
        state = Scheduler(Kernel(kernel_of(made)), replace(TARGET, threads=threads))
        assert len({tuple(s.applied_opts) for s in sketches(state)}) > 1


def test_a_reduction_without_outputs_is_cut() -> None:
    assert heuristic(Scheduler(Kernel(row_sums(1, 1 << 22)), TARGET)).split_reduce is not None


def test_amounts_fit_their_axis() -> None:
    for extent in (1, 2, 7, 16, 17, 28, 56, 100, 197, 1000):
        assert all(0 < n <= extent for n in lane_amounts(extent, 16, 4)), extent
        assert all(0 < n <= min(extent, 14) for n in tile_amounts(extent, 14)), extent
    assert lane_amounts(64, 16, 4)[0] == 64 and lane_amounts(5, 16, 4) == [5], "whole vectors first; a short axis whole"
    assert tile_amounts(28, 14)[0] == 14 and tile_amounts(48, 12)[0] == 12, "no recomputed rows where it can be"


@pytest.mark.parametrize("seed", a_half(range(3)))
def test_sketches_of_what_memory_limits_are_correct_at_any_extents(seed: int) -> None:
    """Row reductions, several rows at a time, tiles of windows of padded rows, and transposed squares, compared with NumPy at random
    extents."""
    rng = random.Random(seed)
    rows, columns, size, channels = rng.choice((17, 24, 41)), rng.choice((128, 149, 300)), rng.choice((1, 7, 19, 33)), rng.choice((1, 3))
    drawn = [data(rows, columns).sum(0), data(columns) @ data(columns, rows * 8), data(rows, columns).max(1),
             data(channels, rows, columns).sum(1), data(rows, columns).transpose(0, 1).contiguous(),
             data(1, channels, size, size).max_pool2d(3, stride=rng.choice((1, 2)), padding=1),
             data(1, channels, size, columns).conv2d(data(channels, 1, 3, 3), padding=1, groups=channels)]
    target = NATIVE[-1] if NATIVE else TARGET
    for tensor in drawn:
        case = Case(Kernel(kernel_of(tensor)))
        for state in sketches(Scheduler(case.kernel, target)):
            program = lower(state)
            if NATIVE:
                run_native(case, program, target, 2)
            else:
                run_interpreted(case, program, 2)


@pytest.mark.parametrize("length", [64, 127, 1009])
def test_sums_over_what_no_cache_holds_have_a_sketch_of_half_vectors(length: int) -> None:
    case = Case(Kernel(row_sums(3, length)))
    for target in (TARGET, *NATIVE[-1:]):
        half = target.vector_bytes // 8

        def halves(state: Scheduler, half: int = half) -> list[Scheduler]:
            return [s for s in sketches(state) if [(o.op, o.axis, o.arg) for o in s.applied_opts[:2]]
                    == [("UPCAST", "r0", half), ("UNROLL", "r0", 4)]]
        assert not halves(Scheduler(case.kernel, target))
        found, = halves(Scheduler(case.kernel, replace(target, l2=1 << 8, l3=1 << 8)))
        run_interpreted(case, lower(found), 1)
        if target in NATIVE:
            run_native(case, lower(found), target, 2)


@pytest.mark.parametrize(("rows", "expected"), [(64, False), (4096, True)])
def test_what_the_second_cache_does_not_hold_is_streamed_in_one_sketch_though_predicted_slower(rows: int, expected: bool) -> None:
    """The kernel reads and stores 16 MB each: a last-level cache of 64 MB has room for both, unless other programs use it."""
    start = Scheduler(Kernel(softmax(rows, 1024)), replace(TARGET, l2=1 << 20, l3=1 << 26))
    streamed = [s for s in sketches(start) if any(o.op == "STREAM" for o in s.applied_opts)]
    assert len(streamed) == expected
    best = heuristic(start)
    assert not any(o.op == "STREAM" for o in best.applied_opts)
    assert all(cost_of(s).cycles > cost_of(best).cycles for s in streamed)


def test_memory_is_read_in_its_order() -> None:
    """For sums of columns the loop over rows is outermost. A transposition stores two cache lines of each row at a time."""
    sums = heuristic(Scheduler(Kernel(kernel_of(data(4096, 4096).sum(0))), TARGET))
    loops = [sums.rows[row].name for row in sums.order[sums.kernel.output] if sums.rows[row].extent > 1]
    assert "r0" in loops[:-1] and loops[-1].startswith("o0")
    pieces = {s.applied_opts[0].arg for s in sketches(Scheduler(sums.kernel, TARGET)) if any(o.op == "ORDER" for o in s.applied_opts)}
    assert {16, 64} <= pieces, "one vector of each row at a time, and four"
    turned = heuristic(Scheduler(Kernel(kernel_of(data(4096, 4096).transpose(0, 1).contiguous())), replace(TARGET, l3=32 << 20)))
    assert turned.stream and [o.arg for o in turned.applied_opts if o.op == "UPCAST"] == [16, 32]


def test_few_long_rows_are_shared_evenly() -> None:
    """Of seven rows that come from memory, two cores compute half of each row, because whole rows would leave a core idle.
    Rows that lie in the second caches, each in that of the core that computed it, are summed up where they are. The sums are right."""
    two = replace(TARGET, threads=2)
    assert heuristic(Scheduler(Kernel(row_sums(7, 1_000_003)), two)).split_reduce is not None
    assert heuristic(Scheduler(Kernel(row_sums(8, 1_000_003)), two)).thread is not None
    assert heuristic(Scheduler(Kernel(row_sums(7, 50_021)), replace(two, l2=1 << 21))).thread is not None
    case = Case(Kernel(row_sums(3, 50_021)))
    target = replace(NATIVE[-1] if NATIVE else TARGET, threads=2, l2=1 << 16)
    state = heuristic(Scheduler(case.kernel, target))
    assert state.split_reduce is not None
    (run_native(case, lower(state), target, 2) if NATIVE else run_interpreted(case, lower(state), 2))


def test_idle_lanes_in_the_last_tile_weigh_less_than_straight_line_code() -> None:
    for extent in (3753, 1009, 4801):
        assert lane_amounts(extent, 16, 4)[0] >= 32, extent
    assert lane_amounts(112, 16, 4)[0] == 16, "64 would compute an eighth more"


@pytest.mark.parametrize(("rows", "columns", "tile", "shared"), [(7, 38, 38, "o0"), (5, 22, 22, "o0"), (67, 47, 16, "r0")])
def test_cores_share_another_loop_if_those_that_divide_evenly_cannot_be_shared(rows: int, columns: int, tile: int, shared: str) -> None:
    """The loop over a tile divides evenly, but it is not the outermost of its axis, so THREAD refuses it. The cores then share the most
    even output loop, or, if it has too few iterations, the sum."""
    tensor, threads = (data(rows, columns).sum(0), 4) if shared == "r0" else (data(rows * columns) + 1, 2)
    state = apply_opts(Scheduler(Kernel(kernel_of(tensor)), replace(AVX512, threads=threads)), [Opt("TILE", "o0", tile)])
    loops = [state.rows[row] for row in state.order[state.kernel.output]]
    assert next(row.extent for row in loops if row.name == "o0.in") % threads == 0 and loops[0].extent % threads
    assert [s.applied_opts[-1] for s in sketch._shared(state) if s is not state] == [Opt("THREAD", shared, threads)]


@pytest.mark.parametrize(("rows", "columns", "is_shared"), [(256, 64, False), (131, 127, False), (1024, 256, True), (768, 509, True)])
def test_cores_share_a_product_only_if_that_saves_more_than_their_start_takes(rows: int, columns: int, is_shared: bool) -> None:
    tensor = (data(rows, columns) * data(columns)).sum(1)
    state = heuristic(Scheduler(Kernel(kernel_of(tensor)), replace(AVX512, threads=2)))
    assert any(opt.op == "THREAD" for opt in state.applied_opts) == is_shared


def test_elements_that_are_looked_up_are_loaded_in_vectors() -> None:
    """Rows of 97 at positions of rows of 41, as in resizing: the bounds of sixteen positions are checked at once."""
    looked_up = data(16, 37, 41).take(data(97, dtype="int32"), 2)
    chosen = heuristic(Scheduler(Kernel(kernel_of(looked_up)), replace(AVX512, threads=2)))
    assert any(opt.op == "UPCAST" and opt.axis == "o1" for opt in chosen.applied_opts)


@pytest.mark.parametrize(("rows", "columns", "is_shared"), [(16, 64, False), (32, 48, False), (512, 512, True), (331, 509, True)])
def test_cores_share_dot_instructions_only_if_that_saves_more_than_their_start_takes(rows: int, columns: int, is_shared: bool) -> None:
    """Dot instructions compute many operations in little time."""
    tensor = data(rows, 768, dtype="bfloat16") @ data(768, columns, dtype="bfloat16")
    state = heuristic(Scheduler(Kernel(kernel_of(tensor)), replace(AVX512, threads=2, features=("amx", *AVX512.features, "bf16"))))
    assert any(opt.op == "TC" for opt in state.applied_opts)
    assert any(opt.op == "THREAD" for opt in state.applied_opts) == is_shared


@pytest.mark.parametrize(("side", "channels", "window"), [(17, 48, 4), (20, 16, 4), (35, 64, 4)])
def test_no_sketch_has_tiles_that_are_hardly_filled(side: int, channels: int, window: int) -> None:
    """The phases of a transposed convolution with a stride of 2 lie along an axis of 2; tiles along other axes are sketches."""
    taps = data(channels, channels, window, window, dtype="bfloat16")
    tensor = data(1, channels, side, side + 3, dtype="bfloat16").conv_transpose2d(taps, stride=2)
    base, shares = Scheduler(Kernel(kernel_of(tensor)), replace(AVX512, threads=2, features=("amx", *AVX512.features, "bf16"))), []
    for s in [*sketches(base), heuristic(base)]:
        for dot in s.dots:
            if dot is not None and DOTS[dot.name].is_tile:
                rows, columns = (s.kernel.axes[a].extent for a in (dot.rows, dot.columns))
                whole = -(-rows // DOTS[dot.name].rows) * -(-columns // DOTS[dot.name].columns)
                shares.append(rows * columns / (whole * DOTS[dot.name].rows * DOTS[dot.name].columns))
    assert shares and min(shares) > HARDLY_FILLED


@pytest.mark.parametrize(("rows", "columns", "is_shared"), [(150, 32, True), (149, 37, True), (3, 5, False), (64, 7, False)])
def test_cores_share_few_operations_that_take_long(rows: int, columns: int, is_shared: bool) -> None:
    looked_up = data(rows, 64).take(data(columns, dtype="int32"), 1)
    state = heuristic(Scheduler(Kernel(kernel_of(looked_up)), replace(AVX512, threads=2)))
    assert any(opt.op == "THREAD" for opt in state.applied_opts) == is_shared
