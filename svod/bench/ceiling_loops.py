"""Measures the peak rates of this machine: multiply-adds per second, bytes per second of each cache level, and the cost of a launch.

The loops are compiled for the target and run on the thread pool that runs kernels:

    fma     A independent accumulators, acc = acc * m + c, with A above latency × issue width
    dot     A accumulators, each adds up 2 products of bfloat16 or 4 of int8 per instruction, if the target has it
    tile    four 16×16 accumulators, each adds up 32 products of bfloat16 or 64 of int8 per instruction, if the target has it
    read    eight vector loads per iteration, or four, or four of half a vector, each into an accumulator of its own
    write   eight vector stores per iteration; write_stream uses non-temporal stores
    copy    eight vector loads and stores per iteration; copy_stream uses non-temporal stores

Rates are flops or bytes per second, for one core and for all threads. A rate comes from the lower quartile of several samples' times.
Disturbances make samples slower; on virtual machines, samples of memory loops can also be up to 2× too fast (in C as well), so the minimum
cannot be used. Bandwidth counts the bytes that the loop accesses: a copy of n bytes counts 2n, without the reads of cache lines that the
hardware makes before overwriting them. A sample of a memory loop is one launch of many passes, because threads may swap their parts of the
memory from launch to launch, and the first pass after a swap reads from another core's cache. `experiments/ceilings_c` has the same loops
in C.
"""
from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from svod.bench.timer import Contestant, calibrate, time_calls
from svod.compile.llvm.codegen import compile_object
from svod.compile.llvm.loaded import LoadedProgram
from svod.compile.lower.program import PhaseSpec, ProgramSpec
from svod.compile.plan.execution_plan import ExecutionPlan
from svod.core.graph.allocator import HUGE_PAGE, private_memory, want_huge_pages
from svod.core.ir.dtype import BY_NAME, DType, dtypes, to_numpy
from svod.core.machine.isa import DOTS
from svod.core.machine.target import Target

LOOPS_REVISION = 9              # version of the loops below; figures cached by another version are measured again
UNROLL = 8                      # vectors per iteration of a memory loop
# (loads per iteration, divisor of the vector's size) of the read loops; the fastest counts. Eight loads are 3 % faster from L1, four are
# 9 % faster from L2, and an AMD Zen 4 reads memory faster with half vectors.
READS = ((8, 1), (4, 1), (4, 2))
FMA_TURNS = 1 << 16             # loop iterations of one thread in one launch
GAP = 16 << 10                  # bytes between the parts of memory of two threads, so that prefetches past a part do not touch the next one
MAX_MEMORY = 512 << 20          # most bytes of all threads together, unless twice the last-level cache is more
QUICK_MEMORY = 128 << 20        # bytes of all threads in a quick measurement; a large last-level cache holds part of them
LOOP_SAMPLE_SECONDS = 2e-3
SHARED_SECONDS = 1e-2  # seconds of a sample with several threads: longer, since the first pass may find its part in another core's cache
SAMPLES, QUICK_SAMPLES, CURVE_SAMPLES = 20, 5, 8
FMA_DTYPES = (dtypes.float32, dtypes.float64)
DOT_INSTRUCTIONS = {"bfloat16": (DOTS["bf16"], DOTS["amxbf16"]), "int8": (DOTS["vnni8"], DOTS["amx8"])}    # on vectors, on tile registers
ACCUMULATOR_TILES = 4           # tile registers used as accumulators, of 8 in all
STREAMS = {"read": ("read",), "write": ("write", "write_stream"), "copy": ("copy", "copy_stream")}
MEMORY_LEVELS = ("l1", "l2", "l3", "memory")


@dataclass(frozen=True)
class CurvePoint:
    """Bytes per second of all threads together on a working set of `bytes`; `copy` is the faster of ordinary and non-temporal stores."""

    bytes: int
    read: float
    copy: float


@dataclass(frozen=True)
class MeasuredCeilings:
    """The measured fields of `Ceilings`."""

    flops: dict[str, tuple[float, float]]
    bandwidth: dict[str, dict[str, tuple[float, float]]]
    dispatch: tuple[float, float]
    curve: tuple[CurvePoint, ...]


def measure_figures(target: Target, threads: int, *, quick: bool) -> MeasuredCeilings:
    """Measure with one thread and with `threads`. A hypervisor may temporarily run two virtual cores on one physical core, which the
    system does not show. Arithmetic takes little time, so it is measured at the beginning and at the end, and the faster result counts."""
    counts = sorted({1, threads})
    loops = CeilingLoops(target)
    samples = QUICK_SAMPLES if quick else SAMPLES
    fma = FMA_DTYPES[:1] if quick else FMA_DTYPES
    flops = measure_flops(loops, counts, samples, fma)
    bandwidth: dict[str, dict[str, tuple[float, float]]] = {}
    curve: dict[int, CurvePoint] = {}
    for level in ("memory",) if quick else MEMORY_LEVELS:
        kinds = ("read", "copy", "copy_stream") if quick else kinds_of(level)
        sizes = [working_set(target, level, n) for n in counts]
        if quick:
            sizes = [min(size, QUICK_MEMORY // n) for n, size in zip(counts, sizes, strict=True)]
        if all(sizes):
            memory = HugePages(max(n * size for n, size in zip(counts, sizes, strict=True)), threads)
            loops.fill(memory, threads)
            count = min(samples, CURVE_SAMPLES) if level == "memory" else samples
            rates = {kind: [loops.memory_rate(kind, n, size, memory, count) for n, size in zip(counts, sizes, strict=True)]
                     for kind in kinds}
            bandwidth[level] = {kind: _both(figures) for kind, figures in rates.items()}
            size = threads * sizes[-1]
            curve[size] = CurvePoint(size, rates["read"][-1], max(rates[k][-1] for k in STREAMS["copy"] if k in rates))
    if not quick:
        memory = HugePages(threads * working_set(target, "memory", threads), threads)
        loops.fill(memory, threads)
        for size in curve_sizes(target, threads):
            read, *copies = (loops.memory_rate(kind, threads, size, memory, CURVE_SAMPLES) for kind in ("read", *STREAMS["copy"]))
            curve[threads * size] = CurvePoint(threads * size, read, max(copies))
    for name, (one, many) in measure_flops(loops, counts, samples, fma).items():
        first_one, first_many = flops[name]
        flops[name] = max(first_one, one), max(first_many, many)
    return MeasuredCeilings(flops, bandwidth, _both([loops.dispatch_cost(n) for n in counts]),
                   () if quick else falling(curve[size] for size in sorted(curve)))


def measure_flops(loops: CeilingLoops, counts: Sequence[int], samples: int, fma: Sequence[DType]) -> dict[str, tuple[float, float]]:
    """Flops per second for each number of threads in `counts`: of multiply-adds on types in `fma`, and of dot and matrix instructions."""
    flops = {dtype.name: _both([loops.fma_round(dtype, n).rate(samples) for n in counts]) for dtype in fma}
    for name in DOT_INSTRUCTIONS:
        if tried := [_both([r.rate(samples) for r in rounds]) for rounds in zip(*(loops.rounds_of(name, n) for n in counts), strict=True)]:
            # bfloat16 converted to float32 runs at float32's rate, which on some processors exceeds the dot instruction's rate
            one, many = zip(*tried, flops["float32"] if name == "bfloat16" else (0.0, 0.0), strict=True)
            flops[name] = max(one), max(many)
    return flops


def falling(points: Iterable[CurvePoint]) -> tuple[CurvePoint, ...]:
    """The points of the curve with rates that never rise with size: a point slower than a larger one was disturbed, and gets its rate."""
    out: list[CurvePoint] = []
    for p in reversed(list(points)):
        out.append(p if not out else CurvePoint(p.bytes, max(p.read, out[-1].read), max(p.copy, out[-1].copy)))
    return tuple(reversed(out))


def kinds_of(level: str) -> tuple[str, ...]:
    """The kinds of traffic that are measured in a cache level. Non-temporal stores bypass L1 and L2, so they are left out there."""
    every = tuple(kind for kinds in STREAMS.values() for kind in kinds)
    return tuple(k for k in every if not k.endswith("_stream")) if level in ("l1", "l2") else every


def curve_sizes(target: Target, threads: int) -> list[int]:
    """Bytes per thread of the curve's working sets that lie between the working sets of the levels: twice L1, L2, 2·L2, 4·L2, …."""
    last = working_set(target, "memory", threads)
    sizes = [2 * target.l1, target.l2]
    while 2 * sizes[-1] < last:
        sizes.append(2 * sizes[-1])
    taken = {working_set(target, level, threads) for level in MEMORY_LEVELS}
    return [s for s in (size // 8192 * 8192 for size in sizes) if s not in taken and s < last]


def _both(rates: list[float]) -> tuple[float, float]:
    """The pair (one core, all threads) of a list with one or two rates; the same rate twice on a single core."""
    return rates[0], rates[-1]


def working_set(target: Target, level: str, threads: int) -> int:
    """Bytes per thread of a working set that fits in `level` but not in the level below it; 0 if there is no such size. Half of a cache
    leaves room for other data. A last-level cache may be shared with other cores or machines to an unknown extent, so eight times L2 is
    enough. For memory, all threads together use four times the last-level cache: of twice its size, a third would still be cached."""
    last = target.l3 or target.l2 * threads
    if level == "l1":
        size = target.l1 // 2
    elif level == "l2":
        size = target.l2 // 2
    elif level == "l3":
        size = min(target.l3 // (2 * threads), 8 * target.l2)
        if size < 2 * target.l2:
            return 0
    else:
        size = max(64 << 20, 2 * last, min(4 * last, MAX_MEMORY)) // threads
    return size // 8192 * 8192


class HugePages:
    """Memory in huge pages, if the system grants them, that is not written yet: the first write to a page decides which NUMA node it is
    on. A huge page is contiguous in physical memory; small pages fill the sets of a large cache unevenly, and differently each time."""

    def __init__(self, size: int, threads: int = 1) -> None:
        """Allocate `size` bytes in two parts for each of `threads` threads, plus gaps between the parts."""
        whole = -(-(size + 2 * threads * GAP) // HUGE_PAGE) * HUGE_PAGE
        self._map = private_memory(whole + HUGE_PAGE)
        want_huge_pages(self._map)
        words = np.frombuffer(self._map, np.int64)
        offset = -int(words.__array_interface__["data"][0]) % HUGE_PAGE
        self.words = words[offset // 8:(offset + whole) // 8]


@dataclass(frozen=True)
class Round:
    """Arithmetic without memory traffic: `run(n)` runs n rounds on all threads; one round has `flops` operations."""

    run: Callable[[int], None]
    flops: float

    def rate(self, samples: int) -> float:
        """Flops per second of this round."""
        return self.flops / _settled(self.run, samples)


class CeilingLoops:
    """The compiled loops for one target. Each is compiled when it is first used."""

    def __init__(self, target: Target) -> None:
        self.target = target
        self.accumulators = 24 if target.vector_registers >= 32 else 12
        self._loaded: dict[str, LoadedProgram] = {}

    def _load(self, symbol: str) -> LoadedProgram:
        if symbol not in self._loaded:
            target = self.target
            if symbol == "nothing":
                ir = _EMPTY_FUNCTION
            elif symbol.startswith("fma_"):
                dtype = BY_NAME[symbol.removeprefix("fma_")]
                ir = _fma_ir(dtype, target.lanes(dtype), self.accumulators, target.has_fma)
            elif symbol.startswith("tile_"):
                ir = _tile_ir(symbol.removeprefix("tile_"))
            elif symbol.startswith("dot_"):
                ir = _dot_ir(symbol.removeprefix("dot_"), self.accumulators)
            else:
                kind, unroll, parts = symbol.rsplit("_", 2)
                ir = _memory_ir(symbol, kind, target.vector_bytes // int(parts), int(unroll))
            attributes = f'attributes #0 = {{ nounwind "prefer-vector-width"="{8 * target.vector_bytes}" }}\n!0 = !{{i32 1}}\n'
            self._loaded[symbol] = LoadedProgram(compile_object(ir + attributes, target, True), (symbol,))
        return self._loaded[symbol]

    def _plan(self, symbol: str, arrays: list[np.ndarray[Any, Any]], dtype: DType, extent: int, threads: int,
              **variables: int) -> ExecutionPlan:
        params = tuple((dtype, a.size) for a in arrays)
        spec = ProgramSpec(symbol, params, (0,), (), (PhaseSpec(symbol, extent, threads, 0),), tuple(variables))
        plan = ExecutionPlan.of_kernel(spec, self._load(symbol), arrays, threads=threads)
        plan.set_variables(variables)
        return plan

    def fma_round(self, dtype: DType, threads: int) -> Round:
        """A round of multiply-adds on vectors of `dtype`."""
        lanes, extent, turns = self.target.lanes(dtype), threads, FMA_TURNS
        out = np.zeros(extent * lanes, to_numpy(dtype))
        # m = 0.5, c = 1 and different starts: the accumulators converge to 2 and stay different expressions
        start = np.concatenate([np.full(lanes, 0.5), np.full(lanes, 1.0), np.repeat(np.arange(self.accumulators), lanes)])
        plan = self._plan(f"fma_{dtype.name}", [out, start.astype(to_numpy(dtype))], dtype, extent, threads, turns=turns)
        return Round(plan.repeat, 2.0 * lanes * self.accumulators * turns * extent)

    def dot_round(self, name: str, threads: int) -> Round:
        """A round of the dot instruction on operands of type `name`."""
        extent, turns = threads, FMA_TURNS
        out, start = np.zeros(16 * extent, np.int32), np.zeros(16 * (2 + self.accumulators), np.int32)
        start[32:] = np.repeat(np.arange(self.accumulators), 16)
        plan = self._plan(f"dot_{name}", [out, start], dtypes.int32, extent, threads, turns=turns)
        per_instruction = 2.0 * 64 / BY_NAME[name].itemsize
        return Round(plan.repeat, per_instruction * self.accumulators * turns * extent)

    def tile_round(self, name: str, threads: int) -> Round:
        """A round of the matrix instruction on operands of type `name`."""
        extent, turns = threads, FMA_TURNS
        start = np.concatenate([np.frombuffer(tile_shapes(), np.int32), np.zeros(256, np.int32)])
        plan = self._plan(f"tile_{name}", [np.zeros(256 * extent, np.int32), start], dtypes.int32, extent, threads, turns=turns)
        return Round(plan.repeat, 2.0 * 16 * 16 * 64 / BY_NAME[name].itemsize * ACCUMULATOR_TILES * turns * extent)

    def rounds_of(self, name: str, threads: int) -> list[Round]:
        """A round for each dot or matrix instruction of the target on operands of type `name`; empty if there is none."""
        target = replace(self.target, uses_intrinsics=True)
        have = [dot for dot in DOT_INSTRUCTIONS.get(name, ()) if dot.runs_on(target)]
        return [self.tile_round(name, threads) if dot.is_tile else self.dot_round(name, threads) for dot in have]

    def best_round(self, dtype: DType, threads: int) -> Round:
        """The fastest round of arithmetic on operands of `dtype`; its rate is `Ceilings.flops_per_second`."""
        rounds = self.rounds_of(dtype.name, threads)
        if not rounds or dtype.name == "bfloat16":
            rounds.append(self.fma_round(dtypes.float64 if dtype.bits == 64 else dtypes.float32, threads))
        return max(rounds, key=lambda r: r.rate(QUICK_SAMPLES)) if len(rounds) > 1 else rounds[0]

    def fill(self, memory: HugePages, threads: int) -> None:
        """Write to every page. Pages that were never written all map to one page of zeros, so reading them would time L1."""
        share = memory.words.nbytes // threads // 8192 * 8192
        plan = self._plan(f"write_{UNROLL}_1", [memory.words, memory.words[:1]], dtypes.int64, threads, threads, bytes=share, passes=1,
                          stride=share)
        plan.execute()

    def memory_rate(self, kind: str, threads: int, size: int, memory: HugePages, samples: int) -> float:
        """Bytes per second of `threads` threads with `size` bytes each; a copy uses half of them as source and half as destination."""
        copies = kind.startswith("copy")
        turn = UNROLL * self.target.vector_bytes
        slice_bytes = size // (2 if copies else 1) // turn * turn
        stride = slice_bytes + GAP
        half = threads * stride // 8
        arrays = [memory.words[half:], memory.words[:half]] if copies else [memory.words, memory.words[:1]]

        def seconds_of_pass(unroll: int, parts: int) -> float:
            plan = self._plan(f"{kind}_{unroll}_{parts}", arrays, dtypes.int64, threads, threads, bytes=slice_bytes, passes=1,
                              stride=stride)

            def run(passes: int) -> None:
                plan.set_variables({"bytes": slice_bytes, "passes": passes, "stride": stride})
                plan.repeat(1)
            return _settled(run, samples, LOOP_SAMPLE_SECONDS if threads == 1 else SHARED_SECONDS)
        seconds = min(seconds_of_pass(*loop) for loop in (READS if kind == "read" else ((UNROLL, 1),)))
        return (2.0 if copies else 1.0) * slice_bytes * threads / seconds

    def dispatch_cost(self, threads: int) -> float:
        """Seconds of an empty launch of `threads` threads inside a plan."""
        return _settled(self._plan("nothing", [np.zeros(1, np.int64)], dtypes.int64, threads, threads).repeat, 10)


def _settled(run: Callable[[int], None], samples: int, seconds: float = LOOP_SAMPLE_SECONDS) -> float:
    """Seconds of one call: the lower quartile of `samples` samples of at least `seconds`."""
    repeats, _ = calibrate(Contestant(run), None, time.perf_counter, seconds)
    times = sorted(time_calls(Contestant(run), repeats) / repeats for _ in range(samples))
    return times[samples // 4]


_LOOPS = """
define void @{name}(ptr noalias %args, ptr noalias %vars, ptr %scratch, i64 %begin, i64 %end) #0 {{
entry:
  %a = load ptr, ptr %args
  %slot = getelementptr ptr, ptr %args, i64 1
  %b = load ptr, ptr %slot
  %count = load i64, ptr %vars
{setup}
  br label %outer
outer:
  %i = phi i64 [ %begin, %entry ], [ %i.next, %outer.end ]
  %go = icmp slt i64 %i, %end
  br i1 %go, label %body, label %done
body:
{body}
outer.end:
{finish}
  %i.next = add i64 %i, 1
  br label %outer
done:
  ret void
}}
"""

_TURN_BEGINS = "  br label %turn", "turn:", "  %t = phi i64 [ 0, %body ], [ %t.next, %turn ]"
_TURN_ENDS = "  %t.next = add i64 %t, 1", "  %more = icmp slt i64 %t.next, %count", "  br i1 %more, label %turn, label %outer.end"
_EMPTY_FUNCTION = """
define void @nothing(ptr %args, ptr %vars, ptr %scratch, i64 %begin, i64 %end) #0 {
  ret void
}
"""


def _fma_ir(dtype: DType, lanes: int, accumulators: int, has_fma: bool) -> str:
    """The LLVM IR of multiply-adds on vectors of `dtype`; see `_accumulate_ir`."""
    vector, fma = f"<{lanes} x {'float' if dtype.bits == 32 else 'double'}>", f"@llvm.fma.v{lanes}f{dtype.bits}"

    def step(n: int) -> list[str]:
        if has_fma:
            return [f"  %y{n} = call {vector} {fma}({vector} %x{n}, {vector} %m, {vector} %c)"]
        return [f"  %z{n} = fmul {vector} %x{n}, %m", f"  %y{n} = fadd {vector} %z{n}, %c"]
    declare = f"declare {vector} {fma}({vector}, {vector}, {vector})" if has_fma else ""
    return declare + _accumulate_ir(f"fma_{dtype.name}", vector, vector, "fadd", lanes * dtype.itemsize, accumulators, step)


def _dot_ir(name: str, accumulators: int) -> str:
    """The LLVM IR of AVX-512's dot instruction on operands of type `name`: 16 lanes, each a sum of 2 products of bfloat16 or 4 of int8.
    See `_accumulate_ir`."""
    operand, vector, add = {"bfloat16": ("<32 x bfloat>", "<16 x float>", "fadd"), "int8": ("<64 x i8>", "<16 x i32>", "add")}[name]
    dot, _ = DOT_INSTRUCTIONS[name]
    function = f"{dot.llvm}.512"
    return f"declare {vector} @{function}({vector}, {operand}, {operand})" + _accumulate_ir(
        f"dot_{name}", operand, vector, add, 64, accumulators,
        lambda n: [f"  %y{n} = call {vector} @{function}({vector} %x{n}, {operand} %m, {operand} %c)"])


def _accumulate_ir(symbol: str, operand: str, vector: str, add: str, size: int, accumulators: int, step: Callable[[int], list[str]]) -> str:
    """The LLVM IR of a loop of accumulators, where `step(n)` computes %yn from %xn, %m and %c. args: (out, [m, c, start values…], `size`
    bytes each); vars: the number of iterations. out[i] = the sum of the accumulators after the loop."""
    names, setup = range(accumulators), []
    for n, (name, kind) in enumerate([("m", operand), ("c", operand), *((f"s{n}", vector) for n in names)]):
        setup += [f"  %p.{name} = getelementptr i8, ptr %b, i64 {n * size}", f"  %{name} = load {kind}, ptr %p.{name}, align 4"]
    body = [*_TURN_BEGINS, *(f"  %x{n} = phi {vector} [ %s{n}, %body ], [ %y{n}, %turn ]" for n in names),
            *(line for n in names for line in step(n)), *_TURN_ENDS]
    finish, total = [], "%y0"
    for n in names[1:]:
        finish.append(f"  %sum{n} = {add} {vector} {total}, %y{n}")
        total = f"%sum{n}"
    finish += [f"  %o.i = mul i64 %i, {size}", "  %o = getelementptr i8, ptr %a, i64 %o.i", f"  store {vector} {total}, ptr %o, align 4"]
    return _LOOPS.format(name=symbol, setup="\n".join(setup), body="\n".join(body), finish="\n".join(finish))


def tile_shapes() -> bytes:
    """The configuration of all eight tile registers: 16 rows of 64 bytes each (Intel SDM volume 1, chapter 18)."""
    shapes = bytearray(64)
    shapes[0] = 1
    shapes[16:32:2] = bytes([64] * 8)
    shapes[48:56] = bytes([16] * 8)
    return bytes(shapes)


def _tile_ir(name: str) -> str:
    """The LLVM IR of a loop that adds the product of the operand (16 rows of 64 bytes) with itself to each accumulator. args: (out,
    [configuration, operand]); vars: the number of iterations. out[i] = the 16×16 sums of the first accumulator."""
    _, tile = DOT_INSTRUCTIONS[name]
    function = tile.llvm
    operand, other = ACCUMULATOR_TILES, ACCUMULATOR_TILES + 1
    body = ["  call void @llvm.x86.ldtilecfg(ptr %b)", "  %rows = getelementptr i8, ptr %b, i64 64"]
    body += [f"  call void @llvm.x86.tileloadd64(i8 {r}, ptr %rows, i64 64)" for r in (operand, other)]
    body += [f"  call void @llvm.x86.tilezero(i8 {n})" for n in range(ACCUMULATOR_TILES)]
    body += [*_TURN_BEGINS, *(f"  call void @{function}(i8 {n}, i8 {operand}, i8 {other})" for n in range(ACCUMULATOR_TILES)), *_TURN_ENDS]
    finish = ["  %o.i = mul i64 %i, 1024", "  %o = getelementptr i8, ptr %a, i64 %o.i",
              "  call void @llvm.x86.tilestored64(i8 0, ptr %o, i64 64)", "  call void @llvm.x86.tilerelease()"]
    declare = "\n".join(["declare void @llvm.x86.ldtilecfg(ptr)", "declare void @llvm.x86.tileloadd64(i8, ptr, i64)",
                         "declare void @llvm.x86.tilestored64(i8, ptr, i64)", "declare void @llvm.x86.tilezero(i8)",
                         "declare void @llvm.x86.tilerelease()", f"declare void @{function}(i8, i8, i8)"])
    return declare + _LOOPS.format(name=f"tile_{name}", setup="", body="\n".join(body), finish="\n".join(finish))


def _memory_ir(symbol: str, kind: str, vector_bytes: int, unroll: int) -> str:
    """The LLVM IR of a loop with `unroll` loads, stores or both of `vector_bytes` per iteration. args: (destination, source), the same
    array for a read; vars: (bytes of a part, passes over it, bytes from one part to the next). Iteration i of the launch works on part
    i. The only induction variable is the pointer into the source, or the destination of writes; a copy stores at a fixed distance from
    it: a separate index makes reads 5 % slower, even from memory."""
    vector = f"<{vector_bytes // 8} x i64>"
    loads, stores, streams = kind != "write" and kind != "write_stream", kind != "read", kind.endswith("_stream")
    units = range(unroll)
    setup = ["  %p.passes = getelementptr i64, ptr %vars, i64 1", "  %passes = load i64, ptr %p.passes",
             "  %p.stride = getelementptr i64, ptr %vars, i64 2", "  %stride = load i64, ptr %p.stride",
             "  %a.int = ptrtoint ptr %a to i64", "  %b.int = ptrtoint ptr %b to i64", "  %distance = sub i64 %a.int, %b.int"]
    body = ["  %base = mul i64 %i, %stride", f"  %first = getelementptr i8, ptr {'%b' if loads and stores else '%a'}, i64 %base",
            "  %last = getelementptr i8, ptr %first, i64 %count", "  br label %pass", "pass:",
            "  %r = phi i64 [ 0, %body ], [ %r.next, %pass.end ]"]
    if not stores:
        body += [f"  %u{n} = phi {vector} [ zeroinitializer, %body ], [ %w{n}, %pass.end ]" for n in units]
    body += ["  br label %turn", "turn:", "  %p = phi ptr [ %first, %pass ], [ %p.next, %turn ]"]
    if not stores:
        body += [f"  %v{n} = phi {vector} [ %u{n}, %pass ], [ %w{n}, %turn ]" for n in units]
    for n in units:
        body.append(f"  %at{n} = getelementptr i8, ptr %p, i64 {n * vector_bytes}")
        value, target = "splat (i64 1)", f"%at{n}"
        if loads:
            body.append(f"  %l{n} = load {vector}, ptr %at{n}, align {vector_bytes}")
            value, target = f"%l{n}", f"%to{n}"
        if stores:
            if loads:
                body.append(f"  %to{n} = getelementptr i8, ptr %at{n}, i64 %distance")
            body.append(f"  store {vector} {value}, ptr {target}, align {vector_bytes}{', !nontemporal !0' if streams else ''}")
        else:
            body.append(f"  %w{n} = xor {vector} %v{n}, %l{n}")
    body += [f"  %p.next = getelementptr i8, ptr %p, i64 {unroll * vector_bytes}", "  %more = icmp ult ptr %p.next, %last",
             "  br i1 %more, label %turn, label %pass.end", "pass.end:", '  call void asm sideeffect "", "~{memory}"()',
             "  %r.next = add i64 %r, 1", "  %again = icmp slt i64 %r.next, %passes", "  br i1 %again, label %pass, label %outer.end"]
    finish = []
    if not stores:
        # one store per part keeps LLVM from removing the loads, and takes no measurable time
        total = "%w0"
        for n in units[1:]:
            finish.append(f"  %sum{n} = xor {vector} {total}, %w{n}")
            total = f"%sum{n}"
        finish.append(f"  store {vector} {total}, ptr %first, align {vector_bytes}")
    return _LOOPS.format(name=symbol, setup="\n".join(setup), body="\n".join(body), finish="\n".join(finish))
