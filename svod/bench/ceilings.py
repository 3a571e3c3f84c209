"""What this machine can do at best: multiply-adds per second, bytes per second by cache level, and the price of a launch.

Measured by loops compiled for the target, run through the same pool as every kernel:

    fma     A independent accumulators, acc = acc * m + c, A more than latency × issue width
    dot     as many, acc += sums of 2 products of bfloat16, or 4 of bytes, where the target has the instruction
    read    eight vector loads a turn, each into an accumulator of its own
    write   eight vector stores a turn; write_stream: past the caches
    copy    a load and a store each; copy_stream: the store past the caches

A figure is the lower quartile of several samples' times: disturbances make a sample slower, but on virtual machines single samples of
memory loops are too fast by up to 2× as well (a C program sees the same), so the least will not do. Bandwidth counts bytes the
kernel asks for: a copy of n bytes counts 2n; what the hardware reads in addition before it overwrites a line is not counted. Numbers
are per second, in flops and bytes, for one core and for all threads.
"""
from __future__ import annotations

import json
import logging
import mmap
import os
import platform
import tempfile
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np

from svod.bench.load import Watch, watch_machine
from svod.bench.timer import Contestant, calibrate, time_calls
from svod.compile.codegen import LoadedProgram, compile_object
from svod.compile.plan import ExecutionPlan
from svod.compile.pool import private_memory
from svod.compile.program import PhaseSpec, ProgramSpec
from svod.core.dtype import BY_NAME, DType, dtypes, to_numpy
from svod.core.target import Target

log = logging.getLogger("svod.bench")

REVISION = 2                    # of the kernels below: cached figures of another one are measured anew
UNROLL = 8                      # vectors per turn of a memory loop
MEMORY_SLICE = 256 << 10        # bytes of one iteration when streaming through memory
MAX_MEMORY = 512 << 20          # never use more than this, unless twice the last-level cache asks for it
SAMPLE_SECONDS = 2e-3
FMA_DTYPES = (dtypes.float32, dtypes.float64)
DOTS = {"bfloat16": "bf16", "int8": "vnni"}     # dot instructions: dtype of the operands → feature of the target
STREAMS = {"read": ("read",), "write": ("write", "write_stream"), "copy": ("copy", "copy_stream")}


@dataclass(frozen=True)
class Ceilings:
    """`flops[dtype]` and `bandwidth[level][kind]` are (one core, all `threads` threads), per second. bfloat16 and int8 are the rates of
    their dot instructions, where the target has them. Levels: l1, l2, l3, memory; kinds: read, write, write_stream, copy, copy_stream. A
    quick measurement has float32 and memory reads and copies only. `dispatch`: seconds of a launch that does nothing inside a plan, (one
    thread, all threads)."""

    target: str
    threads: int
    quick: bool
    flops: dict[str, tuple[float, float]]
    bandwidth: dict[str, dict[str, tuple[float, float]]]
    dispatch: tuple[float, float]

    def flops_per_second(self, dtype: DType, threads: int | None = None) -> float:
        """Multiply-adds of `dtype` count two. Types without a rate of their own are held against float32: float16 is computed in it,
        integers are as wide or wider. Where float64 was not measured it is half of float32."""
        one, many = self.flops["float32"]
        if dtype.bits == 64:
            one, many = self.flops.get("float64", (one / 2, many / 2))
        elif dtype.name in self.flops:
            one, many = self.flops[dtype.name]
        return self._scaled(one, many, threads)

    def bytes_per_second(self, kind: str = "read", level: str = "memory", threads: int | None = None) -> float:
        """`kind` is read, write or copy: for the last two the better of ordinary and streaming stores. KeyError if not measured."""
        best = [self.bandwidth[level][k] for k in STREAMS[kind] if k in self.bandwidth[level]]
        if not best:
            raise KeyError(f"{kind} from {level} was not measured")
        return max(self._scaled(one, many, threads) for one, many in best)

    def bound_seconds(self, flops: float, bytes_read: float, bytes_written: float, dtype: DType, threads: int | None = None) -> float:
        """The roofline: no kernel with these flops and this traffic to and from memory can be faster. The traffic of a kernel that both
        reads and writes is held against the better of the copy and the read ceiling."""
        rate = self.bytes_per_second("read", threads=threads)
        if bytes_written:
            rate = max(rate, self.bytes_per_second("copy", threads=threads))
        return max(flops / self.flops_per_second(dtype, threads), (bytes_read + bytes_written) / rate)

    def _scaled(self, one: float, many: float, threads: int | None) -> float:
        if threads is None or threads >= self.threads:
            return many
        return min(one * threads, many)


def measure_ceilings(target: Target, threads: int | None = None, *, quick: bool = False) -> Ceilings:
    """Measure this machine, which must be what `target` describes. Quick: float32 and memory, in less than half a second;
    else a few seconds. `threads`: default the target's."""
    count = target.threads if threads is None else threads
    counts = sorted({1, count})
    kernels = _Kernels(target)
    samples = 5 if quick else 20
    flops = {}
    for dtype in FMA_DTYPES[:1] if quick else FMA_DTYPES:
        flops[dtype.name] = _both([kernels.fma_rate(dtype, n, samples) for n in counts])
    if not quick and target.vector_bytes == 64:
        for name, feature in DOTS.items():
            if feature in target.features:
                flops[name] = _both([kernels.dot_rate(name, n, samples) for n in counts])
    bandwidth: dict[str, dict[str, tuple[float, float]]] = {}
    for level in ("memory",) if quick else ("l1", "l2", "l3", "memory"):
        kinds = ("read", "copy", "copy_stream") if quick else tuple(k for kinds in STREAMS.values() for k in kinds)
        if level in ("l1", "l2"):
            kinds = tuple(k for k in kinds if not k.endswith("_stream"))        # a streaming store leaves the caches by its nature
        sizes = [_working_set(target, level, n) for n in counts]
        if all(sizes):
            memory = _Memory(max(n * size for n, size in zip(counts, sizes, strict=True)))
            kernels.fill(memory, count)
            bandwidth[level] = {kind: _both([kernels.memory_rate(kind, level, n, size, memory, samples)
                                             for n, size in zip(counts, sizes, strict=True)]) for kind in kinds}
    return Ceilings(target.key, count, quick, flops, bandwidth, _both([kernels.dispatch_cost(n) for n in counts]))


def cached_ceilings(path: Path, target: Target, threads: int | None = None, *, quick: bool = False, refresh: bool = False,
                    watch: Watch = watch_machine) -> Ceilings:
    """The figures of this machine from the JSON file at `path`, measured and added to it if they are missing or `refresh` is set. A full
    record answers a quick question too; one that was measured while the machine was busy is used and not kept, which is logged. A file that
    cannot be read or written is logged and does no harm."""
    count = target.threads if threads is None else threads
    machine = f"{platform.node()}/{target.key}/{count} threads/revision {REVISION}"
    known: dict[str, Any] = {}
    try:
        loaded = json.loads(path.read_text())
        known = loaded if isinstance(loaded, dict) else {}
    except FileNotFoundError:
        log.debug("no ceilings at %s yet", path)
    except (OSError, ValueError) as error:
        log.warning("ceilings in %s cannot be read (%s); they are measured again", path, error)
    if not refresh and machine in known:
        ceilings = _from_json(known[machine])
        if ceilings is not None and (quick or not ceilings.quick):
            return ceilings
    seen = watch()
    ceilings = measure_ceilings(target, count, quick=quick)
    busy = seen().busy
    if busy is not None:
        log.log(logging.INFO if quick else logging.WARNING,
                "the machine was busy while its ceilings were measured (%s): they are too low, and not kept", busy)
        return ceilings
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile("w", dir=path.parent, prefix=path.name, delete=False) as file:
            json.dump(known | {machine: asdict(ceilings)}, file, indent=1)
        os.replace(file.name, path)
    except OSError as error:
        log.warning("ceilings cannot be written to %s: %s", path, error)
    return ceilings


def _from_json(data: Any) -> Ceilings | None:
    """None for a record that is not one of ours."""
    try:
        return Ceilings(str(data["target"]), int(data["threads"]), bool(data["quick"]),
                        {str(k): _pair(v) for k, v in data["flops"].items()},
                        {str(level): {str(k): _pair(v) for k, v in kinds.items()} for level, kinds in data["bandwidth"].items()},
                        _pair(data["dispatch"]))
    except (KeyError, TypeError, ValueError, AttributeError):
        return None


def _pair(value: Any) -> tuple[float, float]:
    one, many = value
    return float(one), float(many)


def _both(rates: list[float]) -> tuple[float, float]:
    """(one core, all threads); on a single core they are the same measurement."""
    return rates[0], rates[-1]


def _working_set(target: Target, level: str, threads: int) -> int:
    """Bytes per thread that live in `level` and not in the one below; 0 if there are none. Half a cache leaves room for
    what else is in it; memory is four times the last-level cache over all threads (of twice, a third is still found in the cache)."""
    last = target.l3 or target.l2 * threads
    if level == "l1":
        size = target.l1 // 2
    elif level == "l2":
        size = target.l2 // 2
    elif level == "l3":
        size = target.l3 // (2 * threads)
        if size < 2 * target.l2:
            return 0
    else:
        size = max(64 << 20, 2 * last, min(4 * last, MAX_MEMORY)) // threads
    return size // 8192 * 8192


class _Memory:
    """Pages that are aligned, huge where the system grants it, and not touched yet: the first write decides which node they belong to."""

    def __init__(self, size: int) -> None:
        self._map = private_memory(-(-size // mmap.PAGESIZE) * mmap.PAGESIZE)
        if size >= 2 << 20 and hasattr(mmap, "MADV_HUGEPAGE"):
            self._map.madvise(mmap.MADV_HUGEPAGE)
        self.words = np.frombuffer(self._map, np.int64)


class _Kernels:
    """The loops for one target, each compiled when it is first asked for."""

    def __init__(self, target: Target) -> None:
        self.target = target
        self.accumulators = 24 if target.vector_registers >= 32 else 12
        self._loaded: dict[str, LoadedProgram] = {}

    def _load(self, symbol: str) -> LoadedProgram:
        if symbol not in self._loaded:
            target = self.target
            if symbol == "nothing":
                ir = _NOTHING
            elif symbol.startswith("fma_"):
                dtype = BY_NAME[symbol.removeprefix("fma_")]
                ir = _fma_ir(dtype, target.lanes(dtype), self.accumulators, target.has_fma)
            elif symbol.startswith("dot_"):
                ir = _dot_ir(symbol.removeprefix("dot_"), self.accumulators)
            else:
                ir = _memory_ir(symbol, target.vector_bytes)
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

    def fma_rate(self, dtype: DType, threads: int, samples: int) -> float:
        """Flops per second of `threads` threads."""
        lanes, extent, turns = self.target.lanes(dtype), 4 * threads, 4096
        out = np.zeros(extent * lanes, to_numpy(dtype))
        # m = 0.5, c = 1 and different starts: the accumulators converge to 2 and are never the same expression.
        start = np.concatenate([np.full(lanes, 0.5), np.full(lanes, 1.0), np.repeat(np.arange(self.accumulators), lanes)])
        plan = self._plan(f"fma_{dtype.name}", [out, start.astype(to_numpy(dtype))], dtype, extent, threads, turns=turns)
        return 2.0 * lanes * self.accumulators * turns * extent / _settled(plan.repeat, samples)

    def dot_rate(self, name: str, threads: int, samples: int) -> float:
        """Flops per second of `threads` threads with the dot instruction on operands of `name`."""
        extent, turns = 4 * threads, 4096
        out, start = np.zeros(16 * extent, np.int32), np.zeros(16 * (2 + self.accumulators), np.int32)
        start[32:] = np.repeat(np.arange(self.accumulators), 16)
        plan = self._plan(f"dot_{name}", [out, start], dtypes.int32, extent, threads, turns=turns)
        per_instruction = 2.0 * 64 / BY_NAME[name].itemsize
        return per_instruction * self.accumulators * turns * extent / _settled(plan.repeat, samples)

    def fill(self, memory: _Memory, threads: int) -> None:
        """Write every page. Pages that were never written are all one page of zeros: reading them would time the first cache."""
        slice_bytes = min(MEMORY_SLICE, memory.words.nbytes // 8192 * 8192)
        self._plan("write", [memory.words, memory.words[:1]], dtypes.int64, memory.words.nbytes // slice_bytes, threads,
                   bytes=slice_bytes, passes=1).execute()

    def memory_rate(self, kind: str, level: str, threads: int, size: int, memory: _Memory, samples: int) -> float:
        """Bytes per second of `threads` threads that have `size` bytes each; a copy splits them into source and destination."""
        copies = kind.startswith("copy")
        slice_bytes = MEMORY_SLICE if level == "memory" else size // (2 if copies else 1)
        slices = threads * size // (2 if copies else 1) // slice_bytes if level == "memory" else threads
        turn = UNROLL * self.target.vector_bytes
        slice_bytes = slice_bytes // turn * turn
        passes = 1 if level == "memory" else max(1, (1 << 20) // slice_bytes)
        half = memory.words.size // 2
        arrays = [memory.words[half:], memory.words[:half]] if copies else [memory.words, memory.words[:1]]
        plan = self._plan(kind, arrays, dtypes.int64, slices, threads, bytes=slice_bytes, passes=passes)
        return (2.0 if copies else 1.0) * slice_bytes * slices * passes / _settled(plan.repeat, samples)

    def dispatch_cost(self, threads: int) -> float:
        """Seconds of a launch of `threads` threads inside a plan when there is nothing to do."""
        return _settled(self._plan("nothing", [np.zeros(1, np.int64)], dtypes.int64, threads, threads).repeat, 10)


def _settled(run: Callable[[int], None], samples: int) -> float:
    """Seconds of one call: the lower quartile of `samples` samples of at least 2 ms."""
    repeats, _ = calibrate(Contestant(run), None, time.perf_counter, SAMPLE_SECONDS)
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

_NOTHING = """
define void @nothing(ptr %args, ptr %vars, ptr %scratch, i64 %begin, i64 %end) #0 {
  ret void
}
"""


def _fma_ir(dtype: DType, lanes: int, accumulators: int, has_fma: bool) -> str:
    """args: (out, [m, c, start values…]); vars: turns. out[i] = the sum of the accumulators after `turns` turns."""
    kind = "float" if dtype.bits == 32 else "double"
    vector, suffix = f"<{lanes} x {kind}>", f"v{lanes}f{dtype.bits}"
    names = range(accumulators)
    setup, step = [f"  %m = load {vector}, ptr %b, align {dtype.itemsize}"], lanes * dtype.itemsize
    for name, n in [("c", 1), *((f"s{n}", n + 2) for n in names)]:
        setup += [f"  %p.{name} = getelementptr i8, ptr %b, i64 {n * step}",
                  f"  %{name} = load {vector}, ptr %p.{name}, align {dtype.itemsize}"]
    body = ["  br label %turn", "turn:", "  %t = phi i64 [ 0, %body ], [ %t.next, %turn ]"]
    body += [f"  %x{n} = phi {vector} [ %s{n}, %body ], [ %y{n}, %turn ]" for n in names]
    for n in names:
        if has_fma:
            body.append(f"  %y{n} = call {vector} @llvm.fma.{suffix}({vector} %x{n}, {vector} %m, {vector} %c)")
        else:
            body += [f"  %z{n} = fmul {vector} %x{n}, %m", f"  %y{n} = fadd {vector} %z{n}, %c"]
    body += ["  %t.next = add i64 %t, 1", "  %more = icmp slt i64 %t.next, %count", "  br i1 %more, label %turn, label %outer.end"]
    finish = []
    total = "%y0"
    for n in names[1:]:
        finish.append(f"  %sum{n} = fadd {vector} {total}, %y{n}")
        total = f"%sum{n}"
    finish += [f"  %o.i = mul i64 %i, {step}", "  %o = getelementptr i8, ptr %a, i64 %o.i",
               f"  store {vector} {total}, ptr %o, align {dtype.itemsize}"]
    declare = f"declare {vector} @llvm.fma.{suffix}({vector}, {vector}, {vector})" if has_fma else ""
    return declare + _LOOPS.format(name=f"fma_{dtype.name}", setup="\n".join(setup), body="\n".join(body), finish="\n".join(finish))


def _dot_ir(name: str, accumulators: int) -> str:
    """As `_fma_ir`, with the dot instruction of AVX-512 on operands of `name`: 16 sums of 2 products of bfloat16, or of 4 of bytes."""
    operand, vector, add, function = {
        "bfloat16": ("<32 x bfloat>", "<16 x float>", "fadd", "llvm.x86.avx512bf16.dpbf16ps.512"),
        "int8": ("<64 x i8>", "<16 x i32>", "add", "llvm.x86.avx512.vpdpbusd.512"),
    }[name]
    names = range(accumulators)
    setup = [f"  %m = load {operand}, ptr %b, align 4", "  %p.c = getelementptr i8, ptr %b, i64 64",
             f"  %c = load {operand}, ptr %p.c, align 4"]
    for n in names:
        setup += [f"  %p.s{n} = getelementptr i8, ptr %b, i64 {64 * (n + 2)}", f"  %s{n} = load {vector}, ptr %p.s{n}, align 4"]
    body = ["  br label %turn", "turn:", "  %t = phi i64 [ 0, %body ], [ %t.next, %turn ]"]
    body += [f"  %x{n} = phi {vector} [ %s{n}, %body ], [ %y{n}, %turn ]" for n in names]
    body += [f"  %y{n} = call {vector} @{function}({vector} %x{n}, {operand} %m, {operand} %c)" for n in names]
    body += ["  %t.next = add i64 %t, 1", "  %more = icmp slt i64 %t.next, %count", "  br i1 %more, label %turn, label %outer.end"]
    finish, total = [], "%y0"
    for n in names[1:]:
        finish.append(f"  %sum{n} = {add} {vector} {total}, %y{n}")
        total = f"%sum{n}"
    finish += ["  %o.i = mul i64 %i, 64", "  %o = getelementptr i8, ptr %a, i64 %o.i", f"  store {vector} {total}, ptr %o, align 4"]
    declare = f"declare {vector} @{function}({vector}, {operand}, {operand})"
    return declare + _LOOPS.format(name=f"dot_{name}", setup="\n".join(setup), body="\n".join(body), finish="\n".join(finish))


def _memory_ir(kind: str, vector_bytes: int) -> str:
    """args: (destination, source), a read has one array as both; vars: (bytes of a slice, passes over it). Iteration i works on slice i."""
    vector = f"<{vector_bytes // 8} x i64>"
    loads, stores, streams = kind != "write" and kind != "write_stream", kind != "read", kind.endswith("_stream")
    source = "%b" if stores else "%a"
    units = range(UNROLL)
    setup = ["  %p.passes = getelementptr i64, ptr %vars, i64 1", "  %passes = load i64, ptr %p.passes"]
    body = ["  %base = mul i64 %i, %count", "  br label %pass", "pass:",
            "  %r = phi i64 [ 0, %body ], [ %r.next, %pass.end ]"]
    if not stores:
        body += [f"  %u{n} = phi {vector} [ zeroinitializer, %body ], [ %w{n}, %pass.end ]" for n in units]
    body += ["  br label %turn", "turn:", "  %t = phi i64 [ 0, %pass ], [ %t.next, %turn ]"]
    if not stores:
        body += [f"  %v{n} = phi {vector} [ %u{n}, %pass ], [ %w{n}, %turn ]" for n in units]
    body += ["  %at = add i64 %base, %t"]
    for n in units:
        body.append(f"  %at{n} = add i64 %at, {n * vector_bytes}")
        value = "splat (i64 1)"
        if loads:
            body += [f"  %src{n} = getelementptr i8, ptr {source}, i64 %at{n}",
                     f"  %l{n} = load {vector}, ptr %src{n}, align {vector_bytes}"]
            value = f"%l{n}"
        if stores:
            hint = ", !nontemporal !0" if streams else ""
            body += [f"  %dst{n} = getelementptr i8, ptr %a, i64 %at{n}",
                     f"  store {vector} {value}, ptr %dst{n}, align {vector_bytes}{hint}"]
        else:
            body.append(f"  %w{n} = xor {vector} %v{n}, %l{n}")
    body += [f"  %t.next = add i64 %t, {UNROLL * vector_bytes}", "  %more = icmp slt i64 %t.next, %count",
             "  br i1 %more, label %turn, label %pass.end", "pass.end:", '  call void asm sideeffect "", "~{memory}"()',
             "  %r.next = add i64 %r, 1", "  %again = icmp slt i64 %r.next, %passes", "  br i1 %again, label %pass, label %outer.end"]
    finish = []
    if not stores:
        # The result goes where the slice begins, so that the loads are needed; a store per slice is not seen.
        total = "%w0"
        for n in units[1:]:
            finish.append(f"  %sum{n} = xor {vector} {total}, %w{n}")
            total = f"%sum{n}"
        finish += ["  %o = getelementptr i8, ptr %a, i64 %base", f"  store {vector} {total}, ptr %o, align {vector_bytes}"]
    return _LOOPS.format(name=kind, setup="\n".join(setup), body="\n".join(body), finish="\n".join(finish))
