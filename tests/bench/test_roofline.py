"""Ceilings: the loops compute the assumed number of operations, the arithmetic of rates is right, and the cache survives damaged files."""
import json
from dataclasses import asdict, replace

import numpy as np
import pytest

import svod
from svod import PrepareConfig, Tensor
from svod.bench import ceiling_loops as loops
from svod.bench import roofline as module
from svod.bench.ceiling_loops import CurvePoint
from svod.bench.load import MachineLoad
from svod.bench.roofline import Ceilings, cached_ceilings, known_ceilings, measure_ceilings
from svod.cli.tune.survey import SurveyRow, rate_of
from svod.compile.cpu.host import host_target
from svod.core.cost.op_count import count_operations
from svod.core.ir.dtype import dtypes
from svod.prepare import prepare_graph
from svod.tune.resolved import resolve
from svod.tune.session import bound_at
from tests.bench.example_run import CEILINGS, MACHINE
from tests.draws import a_half


def sample(**changes):
    values = {"target": "t", "threads": 4, "quick": False, "flops": {"float32": (100.0, 360.0)}, "dispatch": (1e-8, 1e-7),
              "bandwidth": {"memory": {"read": (10.0, 20.0), "copy": (8.0, 16.0), "copy_stream": (9.0, 25.0)}}}
    return Ceilings(**values | changes)


def test_figures():
    c = sample()
    assert c.flops_per_second(dtypes.float32) == 360.0 and c.flops_per_second(dtypes.float16, 2) == 200.0
    assert c.flops_per_second(dtypes.float64) == 180.0
    assert sample(flops={"float32": (1.0, 2.0), "float64": (0.3, 0.6)}).flops_per_second(dtypes.float64, 1) == 0.3
    assert c.bytes_per_second() == 20.0 and c.bytes_per_second("copy") == 25.0 and c.bytes_per_second("copy", threads=1) == 9.0
    with pytest.raises(KeyError, match="write from memory"):
        c.bytes_per_second("write")


@pytest.mark.slow
def test_quick_measurement_of_this_machine():
    c = measure_ceilings(host_target(), quick=True)
    assert c.quick and set(c.flops) - set(loops.DOT_INSTRUCTIONS) == {"float32"} and set(c.bandwidth) == {"memory"}
    figures = [*c.flops["float32"], *(f for pair in c.bandwidth["memory"].values() for f in pair)]
    assert all(1e8 < f < 1e15 for f in figures) and all(0 < d < 1e-2 for d in c.dispatch)


@pytest.mark.parametrize("quick", a_half([False, True]))
def test_what_holds_a_core_for_a_moment_does_not_spoil_the_arithmetic(monkeypatch, quick):
    """The first measurement on all threads has one type's rate disturbed, the second measurement another type's."""
    looks = iter([{"float32": (100.0, 101.0), "float64": (50.0, 99.0)}, {"float32": (98.0, 197.0), "float64": (49.0, 50.0)}])
    monkeypatch.setattr(loops, "measure_flops", lambda *_: next(looks))
    monkeypatch.setattr(loops, "MEMORY_LEVELS", ())
    monkeypatch.setattr(loops, "curve_sizes", lambda *_: [])
    monkeypatch.setattr(loops, "working_set", lambda *_: 1 << 16)
    if quick:
        monkeypatch.setattr(loops, "QUICK_MEMORY", 1 << 16)
    assert measure_ceilings(host_target(), quick=quick).flops == {"float32": (100.0, 197.0), "float64": (50.0, 99.0)}


@pytest.mark.parametrize("dtype", loops.FMA_DTYPES)
def test_fma_loop_counts_what_it_computes(dtype):
    """x = x/2 + 1 after n turns is 2 + (x0 - 2) / 2^n: the sum over accumulators shows that every one took every turn."""
    kernels = loops.CeilingLoops(host_target())
    lanes, count = host_target().lanes(dtype), kernels.accumulators
    start = np.concatenate([np.full(lanes, 0.5), np.full(lanes, 1.0), np.repeat(np.arange(count), lanes)]).astype(dtype.name)
    for turns in (1, 2, 7):
        out = np.zeros(3 * lanes, dtype.name)
        kernels._plan(f"fma_{dtype.name}", [out, start], dtype, 3, 1, turns=turns).execute()
        np.testing.assert_allclose(out, sum(2 + (x - 2) / 2**turns for x in range(count)), rtol=1e-6)


@pytest.mark.parametrize("threads", [1, 2])
def test_memory_loops_touch_every_byte(threads):
    kernels = loops.CeilingLoops(host_target())
    words, source = loops.HugePages(1 << 16).words[:1 << 13], loops.HugePages(1 << 16).words[:1 << 13]
    rng = np.random.default_rng(0)
    source[:] = rng.integers(-99, 99, source.size)
    for kind in ("copy", "copy_stream", "write", "write_stream"):
        words[:] = 0
        kernels._plan(f"{kind}_8_1", [words, source], dtypes.int64, 8, threads, bytes=1 << 13, passes=2, stride=1 << 13).execute()
        assert (words == (source if kind.startswith("copy") else 1)).all(), kind
    for unroll, parts in loops.READS:       # with a gap: parts of 7 KiB, 8 KiB apart
        lanes = host_target().vector_bytes // 8 // parts
        words[:] = source
        symbol = f"read_{unroll}_{parts}"
        kernels._plan(symbol, [words, source], dtypes.int64, 8, threads, bytes=7 << 10, passes=1, stride=1 << 13).execute()
        expected = np.bitwise_xor.reduce(source.reshape(8, -1, lanes)[:, :(7 << 10) // (8 * lanes)], axis=1)
        assert (words.reshape(8, -1, lanes)[:, 0] == expected).all()


def test_working_sets_fit_their_level():
    target = host_target()
    for threads in (1, target.threads):
        l1, l2, l3, memory = (loops.working_set(target, level, threads) for level in ("l1", "l2", "l3", "memory"))
        assert 0 < l1 < target.l1 and l1 < l2 < target.l2
        assert l3 == 0 or (target.l2 < l3 and threads * l3 < target.l3)
        assert threads * memory >= 2 * target.l3 - 8192 * threads
        between = loops.curve_sizes(target, threads)
        assert between == sorted(between) and between[0] > l1 and between[-1] < memory and not {l1, l2, l3, memory} & set(between)


def test_the_curve_gives_the_rate_of_any_size():
    """The rate between two points is interpolated logarithmically: halfway from 1 MB to 4 MB is 2 MB, and from 100 to 25 it is 50."""
    c = sample(curve=(CurvePoint(1 << 20, 100.0, 80.0), CurvePoint(4 << 20, 25.0, 45.0)))
    assert c.rate_at(1, False) == c.rate_at(1 << 20, True) == 100.0
    assert c.rate_at(2 << 20, False) == pytest.approx(50.0)
    assert c.rate_at(4 << 20, False) == pytest.approx(25.0) and c.rate_at(1 << 30, True) == 45.0
    with pytest.raises(ValueError, match="no curve"):
        sample().rate_at(1 << 20, False)


def test_the_bound_is_the_roofline_at_the_level_of_the_operands():
    """Two cores with 1 MB of second-level cache each, half of which is 1 MB in total; half of the 32 MB last-level cache is 16 MB."""
    compute = CEILINGS.bound([(dtypes.float32, 512e9)], 1e6, 0, MACHINE)
    assert compute.by == "compute" and compute.seconds == pytest.approx(1.0) and compute.intensity == pytest.approx(512e3)
    assert CEILINGS.bound([(dtypes.float32, 256e9), (dtypes.float64, 128e9)], 1e3, 0, MACHINE).seconds == pytest.approx(1.0)
    inside = CEILINGS.bound([], 0.5e6, 0, MACHINE)
    assert inside.by == "l2" and inside.bytes_per_second == pytest.approx(420e9), "what fits the cores' second-level caches has their rate"
    assert CEILINGS.bound([], 4e6, 0, MACHINE).by == "l3"
    memory = CEILINGS.bound([], 104e6, 0, MACHINE)
    assert memory.by == "memory" and memory.seconds == pytest.approx(2e-3) and memory.is_measured
    assert CEILINGS.bound([], 52e6, 52e6, MACHINE).bytes_per_second == 52e9, "the better of read and copy"
    assert CEILINGS.bound([], 104e6, 0, MACHINE, threads=1).bytes_per_second == 39e9, "what one thread reaches of memory"
    assert CEILINGS.bound([(dtypes.float32, 258e9)], 1e6, 0, MACHINE, threads=1).seconds == pytest.approx(1.0)
    nothing = CEILINGS.bound([], 0, 0, MACHINE)
    assert nothing.intensity == nothing.seconds == 0.0 and nothing.flops_per_second == 512e9


def test_traffic_of_a_level_that_was_not_measured_has_no_bound():
    quick = replace(CEILINGS, quick=True, curve=(), bandwidth={"memory": CEILINGS.bandwidth["memory"]})
    copy = quick.bound([(dtypes.float32, 1e6)], 4e6, 4e6, MACHINE)
    assert copy.by == "l3" and copy.bytes_per_second is None and not copy.is_measured and copy.seconds == pytest.approx(1e6 / 512e9)
    gemm = quick.bound([(dtypes.float32, 1e9)], 4e6, 4e6, MACHINE)
    assert gemm.by == "compute" and gemm.is_measured and gemm.seconds == pytest.approx(1e9 / 512e9)
    assert quick.bound([], 52e6, 0, MACHINE).seconds == pytest.approx(1e-3), "memory is"


def test_operands_are_held_against_the_rate_of_their_size():
    """A last-level cache of 480 MB, of which this machine may use a part: 64 MB are read at 50 GB/s, 256 MB at memory's 20."""
    measured = ((1, 400.0), (4, 200.0), (64, 50.0), (256, 20.0), (1024, 20.0))
    ceilings = replace(CEILINGS, curve=tuple(CurvePoint(size << 20, rate * 1e9, rate * 1e9) for size, rate in measured))
    machine = replace(MACHINE, l2=2 << 20, l3=480 << 20)
    here = ceilings.bound([], 64 << 20, 0, machine)
    assert here.by == "l3" and here.bytes_per_second == pytest.approx(50e9)
    assert ceilings.bound([], 32 << 20, 32 << 20, machine).seconds == pytest.approx((64 << 20) / 50e9)
    beyond = ceilings.bound([], 230 << 20, 0, machine)
    assert beyond.by == "memory" and beyond.bytes_per_second is not None and 20e9 < beyond.bytes_per_second < 22e9
    small = ceilings.bound([], 1 << 10, 0, machine)
    assert small.bytes_per_second == pytest.approx(283e9, rel=0.01), "half the cores' second-level caches"


def test_all_tools_state_one_bound():
    """svod-tune, the search, svod-bench, svod.profile and analyze, for kernels that arithmetic and memory limit."""
    machine = host_target()
    rows, inner = 700, 600
    x, y = np.ones((rows, inner), np.float32), np.ones((inner, 300), np.float32)
    graphs = {"product": lambda: Tensor(x) @ Tensor(y), "sum": lambda: Tensor(x).sum(0), "copy": lambda: Tensor(x).cast("float64") * 2}
    for name, graph in graphs.items():
        plan = graph().prepare(PrepareConfig(db=":none:", object_cache=":none:"))
        [key] = {k.key for k in plan.kernels}
        kernel = prepare_graph([graph().uop], resolve(PrepareConfig(db=":none:", object_cache=":none:"))).unbound.kernels[key]
        work = count_operations(kernel.ast)
        stated = CEILINGS.bound(work.arithmetic, work.bytes_read, work.bytes_written, machine)
        searched = bound_at(kernel, ((),), machine, CEILINGS)
        assert searched is not None and searched.by == stated.by and searched.seconds == pytest.approx(stated.seconds), name
        row = SurveyRow(kernel, name, (), 1, 1e-3, 1.0, "", float(work.flops), float(work.bytes_moved))
        assert rate_of(row, 1e-3, machine, CEILINGS).share == pytest.approx(stated.seconds / 1e-3), name
        [profiled] = svod.profile(plan, seconds=0.0, ceilings=CEILINGS).kernels
        here = CEILINGS.bound(work.arithmetic, work.bytes_read, work.bytes_written, machine, plan.threads)
        assert profiled.bound == pytest.approx(here.seconds), name
        [analysed] = plan.analyze(CEILINGS).kernels
        own = CEILINGS.bound(work.arithmetic, work.bytes_read, work.bytes_written, machine, analysed.threads)
        launches = analysed.launches * CEILINGS.dispatch[analysed.threads > 1]
        assert analysed.seconds == pytest.approx(own.seconds + launches), name


def test_no_working_set_is_slower_than_a_larger_one():
    found = loops.falling([CurvePoint(1, 9.0, 4.0), CurvePoint(2, 5.0, 6.0), CurvePoint(4, 7.0, 1.0)])
    assert found == (CurvePoint(1, 9.0, 6.0), CurvePoint(2, 7.0, 6.0), CurvePoint(4, 7.0, 1.0)) and loops.falling([]) == ()


def test_known_ceilings_measure_nothing(tmp_path):
    path, target = tmp_path / "ceilings.json", host_target()
    assert known_ceilings(path, target) is None
    path.write_text(json.dumps({module._machine(target, target.threads): asdict(sample(curve=(CurvePoint(1, 2.0, 3.0),)))}))
    assert known_ceilings(path, target) == sample(curve=(CurvePoint(1, 2.0, 3.0),))
    assert known_ceilings(path, target, target.threads + 1) is None


def test_cache(tmp_path, monkeypatch, caplog):
    target, path = host_target(), tmp_path / "deep" / "ceilings.json"
    measured = []

    def measure(target, threads=None, *, quick=False):
        measured.append(quick)
        return sample(quick=quick)

    monkeypatch.setattr(module, "measure_ceilings", measure)
    assert cached_ceilings(path, target, quick=True) == cached_ceilings(path, target, quick=True) == sample(quick=True)
    assert measured == [True]
    assert cached_ceilings(path, target) == sample()            # a quick record does not answer a full request
    assert cached_ceilings(path, target, quick=True) == sample()
    assert measured == [True, False]
    cached_ceilings(path, target, refresh=True)
    cached_ceilings(path, target, 1)                            # another number of threads has another record
    assert measured == [True, False, False, False] and len(json.loads(path.read_text())) == 2

    for damage in ("{", "[]", json.dumps({key: {"flops": 3} for key in json.loads(path.read_text())})):
        path.write_text(damage)
        assert cached_ceilings(path, target) == sample()
    assert len(measured) == 7
    assert not [p for p in path.parent.iterdir() if p != path]

    file = tmp_path / "file"
    file.write_text("")
    assert cached_ceilings(file / "ceilings.json", target) == sample()
    assert "cannot be written" in caplog.text


def test_figures_of_a_busy_machine_are_kept_as_such_and_measured_again(tmp_path, monkeypatch, caplog):
    path, target = tmp_path / "ceilings.json", host_target()
    monkeypatch.setattr(module, "measure_ceilings", lambda target, threads=None, *, quick=False: sample(quick=quick))

    def busy():
        return lambda: MachineLoad(1.0, foreign=0.5)
    why = "other processes used 50 % of the machine"
    assert cached_ceilings(path, target, watch=busy) == replace(sample(), busy=why)
    assert "the machine was busy" in caplog.text
    assert known_ceilings(path, target) == replace(sample(), busy=why), "a report draws what was measured beside the kernels"
    assert cached_ceilings(path, target, quick=True, watch=busy) == replace(sample(quick=True), busy=why)
    assert cached_ceilings(path, target, watch=lambda: MachineLoad) == sample() == known_ceilings(path, target)
    assert cached_ceilings(path, target, watch=busy) == sample(), "nothing is measured"
    assert cached_ceilings(path, target, refresh=True, watch=busy) == replace(sample(), busy=why)
    assert known_ceilings(path, target) == sample(), "quiet figures stay"


def test_dot_instructions_have_rates_of_their_own():
    c = sample(flops={"float32": (100.0, 360.0), "int8": (400.0, 1440.0)})
    assert c.flops_per_second(dtypes.int8) == c.flops_per_second(dtypes.uint8) == 1440.0 and c.flops_per_second(dtypes.int8, 1) == 400.0
    assert c.flops_per_second(dtypes.int16) == 720.0, "vectors of half as many"
    assert c.compute_seconds([(dtypes.int8, 1440), (dtypes.float32, 180)]) == 1.5
    assert sample().flops_per_second(dtypes.int8) == sample().flops_per_second(dtypes.uint16) == 360.0, "not measured"
    assert c.flops_per_second(dtypes.bfloat16) == 360.0 and c.flops_per_second(dtypes.int32) == 360.0


@pytest.mark.parametrize(("name", "product"), [("int8", 4 * 3 * 5), ("bfloat16", 2 * 3 * 5)])
def test_dot_loops_compute_dots(name, product):
    """Accumulator n starts at n; each of 2 turns adds 4 products of bytes, or 2 of bfloat16. Needs the instruction."""
    target = host_target()
    if not loops.DOT_INSTRUCTIONS[name][0].runs_on(target):
        return
    kernels = loops.CeilingLoops(target)
    start = np.zeros((2 + kernels.accumulators, 64), np.uint8)
    if name == "int8":
        start[0], start[1] = 3, 5
        start[2:].view(np.int32)[:] = np.arange(kernels.accumulators)[:, None]
    else:
        bits = np.array([3.0, 5.0], np.float32).view(np.uint32) >> 16
        start[:2].view(np.uint16)[:] = bits[:, None]
        start[2:].view(np.float32)[:] = np.arange(kernels.accumulators)[:, None]
    out = np.zeros(16, np.int32 if name == "int8" else np.float32)
    kernels._plan(f"dot_{name}", [out.view(np.int32), start.view(np.int32).reshape(-1)], dtypes.int32, 1, 1, turns=2).execute()
    assert (out == sum(range(kernels.accumulators)) + kernels.accumulators * 2 * product).all()


@pytest.mark.parametrize(("name", "sums"), [("int8", 64 * 3 * 5), ("bfloat16", 32 * 3 * 5)])
def test_tile_loops_compute_tiles(name, sums):
    """Each of 2 turns adds the products of 64 bytes, or of 32 numbers of bfloat16. Needs the instruction."""
    target = host_target()
    if "amx" not in target.features:
        pytest.skip("the host has no amx")
    start = np.zeros((17, 64), np.uint8)
    start[0] = np.frombuffer(loops.tile_shapes(), np.uint8)
    if name == "int8":
        start[1:] = 3
    else:
        start[1:].view(np.uint16)[:] = np.array([3.0], np.float32).view(np.uint32) >> 16
    out = np.zeros(256, np.int32 if name == "int8" else np.float32)
    loops.CeilingLoops(target)._plan(f"tile_{name}", [out.view(np.int32), start.view(np.int32).reshape(-1)], dtypes.int32, 1, 1,
                                     turns=2).execute()
    assert (out == 2 * sums // 5 * 3).all()
