"""An emulator that runs the LLVM IR for ptxas on the CPU: NVIDIA's intrinsics are mapped to the host, and each thread is a coroutine.

    ptr addrspace(3), addrspacecast            ptr, the same pointer
    call i32 @llvm.nvvm.read.ptx.sreg.tid.x()  a load from the thread's context
    cp.async                                   recorded, and done at once or at the wait for it; a thread that ends without a wait is an
    error cp.async.bulk                              recorded with its mbarrier, and done at once or at a wait for the end of its phase
    barrier, shfl.sync, ldmatrix, mma.sync     operands into the context, suspend; when all have arrived, the results are in the context
    assembly with wgmma                        the same for the threads of a warpgroup; before the wait for a product its registers have
                                               arbitrary contents, and the shared memory that it reads must not change
    fence.proxy.async, before a barrier        wgmma reads the contents of shared memory at the last barrier with a fence by all threads

LLVM's coroutine passes split a kernel at its suspension points. Warps run in an order drawn from a seed, each as far as it can before the
next one; the threads of a warp run one after another, each up to its next suspension. A random choice decides which asynchronous copies are
done at once. So the emulator finds threads that read data still being copied, and copies over data that other threads still read. NumPy
computes the collective operations of a warp when all its threads have arrived. It is an error if threads that must wait at the same
instruction wait at different ones. Shared memory starts as NaNs."""
from __future__ import annotations

import ctypes
import random
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import llvmlite.binding as llvm
import numpy as np

from svod.compile.cuda.queue import grid_of
from svod.compile.cuda.render import DYNAMIC, block_of, dynamic_bytes, render, without_assumptions
from svod.compile.cuda.targets import WARP
from svod.compile.lower.program import Program
from svod.core.machine.target import Target
from svod.errors import CompileError
from tests.interpreted import poisoned_temporaries

Array = np.ndarray[Any, Any]
WORDS = 384             # words of a thread's context: 0…7 registers, 8 why it waits, 10 whether it has fenced, 16… operands and results
OPERANDS, FENCED = 16, 10
REGISTERS = {"tid.x": 0, "ctaid.x": 1, "ctaid.y": 2, "nctaid.x": 3}
TRY_WAIT = "mbarrier.try_wait.parity"
BARRIER = "llvm.nvvm.barrier.cta.sync.aligned.all"
WARPGROUP = 128
NAN = 0x7FC0_7FC0       # NaN as float32, and as two bfloat16
_CALL = re.compile(r"\s*(?:(%\S+) = )?call (.+?) @(llvm\.nvvm\.[\w.]+)\((.*)\)$")
_ASSEMBLY = re.compile(r'\s*(?:(%\S+) = )?call (.+?) asm sideeffect "(?:\{ \.reg \.pred p; setp\.eq\.u32 p, 0, 0; )?'
                       r'(wgmma[^"}]*(?:\{[^"}]*\}[^"}]*)*)\}?", "[^"]*"\((.*)\)$')
_BULK = re.compile(r'\s*(?:(%\S+) = )?call (?:void|i32) asm sideeffect "((?:mbarrier|cp\.async\.bulk|\{ \.reg \.pred p; mbarrier)[^"]*)", '
                   r'"[^"]*"\((.*)\)$')
_WIDTH = {"i32": 4, "float": 4, "i64": 8, "ptr": 8, "<2 x half>": 4, "ptr addrspace(3)": 8, "ptr addrspace(1)": 8}
_BFLOAT = re.compile(r"\s*(%\S+) = fptrunc (<(\d+) x float>|float) (\S+) to (<\d+ x bfloat>|bfloat)$")
_SPACE = re.compile(r"= addrspacecast ptr(?: addrspace\(\d\))? (\S+) to ptr(?: addrspace\(\d\))?$")
_SCRATCH = re.compile(r"\s*%scratch(\d+) = alloca \[(\d+) x i8\]")
_PROLOGUE = """entry:
  %coro.id = call token @llvm.coro.id(i32 64, ptr null, ptr null, ptr null)
  %coro.size = call i64 @llvm.coro.size.i64()
  %coro.more = add i64 %coro.size, 63
  %coro.whole = and i64 %coro.more, -64
  %coro.memory = call ptr @aligned_alloc(i64 64, i64 %coro.whole)
  %coro.handle = call ptr @llvm.coro.begin(token %coro.id, ptr %coro.memory)"""
_EPILOGUE = """  %coro.last = call i8 @llvm.coro.suspend(token none, i1 true)
  switch i8 %coro.last, label %coro.out [i8 0, label %coro.end
    i8 1, label %coro.end]
coro.end:
  %coro.freed = call ptr @llvm.coro.free(token %coro.id, ptr %coro.handle)
  call void @free(ptr %coro.freed)
  br label %coro.out
coro.out:
  call void @llvm.coro.end(ptr %coro.handle, i1 false, token none)
  ret ptr %coro.handle
}"""
_DECLARATIONS = """declare token @llvm.coro.id(i32, ptr, ptr, ptr)
declare i64 @llvm.coro.size.i64()
declare ptr @llvm.coro.begin(token, ptr)
declare i8 @llvm.coro.suspend(token, i1)
declare void @llvm.coro.end(ptr, i1, token)
declare ptr @llvm.coro.free(token, ptr)
declare ptr @aligned_alloc(i64, i64)
declare void @free(ptr)
declare void @emulated_copy(ptr, ptr, ptr, i32, i32)
declare void @emulated_wait(ptr, i32)
declare void @emulated_count(ptr, i32)
declare void @emulated_row(ptr, ptr, i32, ptr)
"""


class Shared(NamedTuple):
    """Shared memory of a block: its content, the content that wgmma reads, and the known alignment of its address."""

    content: Array
    fenced: Array
    begins: int


class DeviceFault(CompileError):
    """Raised for a kernel that does something undefined or forbidden on a GPU."""


Copies = list[list[tuple[int, int, int]]]       # (to, from, bytes left to copy), those committed together; the last are open
_copies: dict[int, Copies] = {}                 # key: address of a thread's context
started: list[tuple[int, int, int]] = []        # (address of a context, to, bytes) of the copies of the last block, as they were started
matrices: list[Array] = []                      # offsets in shared memory of the eight lines that a product reads at once
_faults: list[str] = []
_zeros = (ctypes.c_uint64 * 2)()
_draws = random.Random(0)                       # draws for the module that runs


def _left(to: int, source: int, nbytes: int) -> int:
    """Draw whether a copy is done at once or as late as allowed; returns the number of bytes that remain to be copied."""
    if _draws.random() < 0.5:
        return nbytes
    ctypes.memmove(to, source, nbytes)
    return 0


def _started(thread: int, to: int, source: int, given: int, nbytes: int) -> None:
    if given not in (0, nbytes):
        _faults.append(f"cp.async of {given} bytes of {nbytes}")
    source = source if given else ctypes.addressof(_zeros)
    if to % nbytes or source % nbytes:
        _faults.append(f"cp.async of {nbytes} bytes at an address that is no multiple of them")
    started.append((thread, to, nbytes))
    _copies.setdefault(thread, [[]])[-1].append((to, source, _left(to, source, nbytes)))


def _waited(thread: int, number: int) -> None:
    """Do commit_group if the number is negative, otherwise wait_group."""
    own = _copies.setdefault(thread, [[]])
    if number < 0:
        own.append([])
        return
    done = max(0, len(own) - 1 - number)
    for group in own[:done]:
        for to, source, nbytes in group:
            ctypes.memmove(to, source, nbytes)
    del own[:done]


class Counted:
    """An mbarrier: the arrivals of each phase, the missing arrivals and bytes of the current one, its number, and unfinished copies."""

    def __init__(self, arrivals: int):
        self.arrivals = self.to_come = arrivals
        self.nbytes = self.phase = 0
        self.rows: list[tuple[int, int, int, int]] = []     # (to, from, bytes, bytes left to copy)

    def has_ended(self, parity: int) -> bool:
        """Whether the phase of a parity has ended; unfinished copies are completed first."""
        if self.to_come == 0:
            for to, source, nbytes, left in self.rows:
                ctypes.memmove(to, source, left)
                self.nbytes -= nbytes
            self.rows.clear()
            if self.nbytes == 0:
                self.to_come, self.phase = self.arrivals, self.phase + 1
        return self.phase % 2 != parity


INIT, INVALIDATE, ARRIVED = -1, -2, -3        # requests to `_counted` beside numbers of bytes; INIT comes with the number of arrivals
_counts: dict[int, Counted] = {}              # mbarriers by address


def _counted(at: int, number: int) -> None:
    """Do an operation on an mbarrier. `number` ≥ 0: arrive.expect_tx of that many bytes; INVALIDATE: inval; ARRIVED: arrive; below: init
    for ARRIVED - number arrivals."""
    if at % 8:
        _faults.append("an mbarrier at an address that is no multiple of 8")
    if number < ARRIVED:
        if at in _counts:
            _faults.append("an mbarrier is made twice")
        _counts[at] = Counted(ARRIVED - number)
    elif at not in _counts:
        _faults.append("there is no mbarrier")
    elif number == INVALIDATE:
        if _counts.pop(at).rows:
            _faults.append("an mbarrier goes while rows are under way")
    else:
        count = _counts[at]
        count.to_come -= 1
        count.nbytes += max(0, number)
        if count.to_come < 0:
            _faults.append("more arrive at an mbarrier than it expects")


def _row(to: int, source: int, nbytes: int, at: int) -> None:
    if to % 16 or source % 16 or nbytes % 16:
        _faults.append(f"cp.async.bulk of {nbytes} bytes, which or whose addresses are no multiples of 16")
    if at not in _counts:
        _faults.append("there is no mbarrier")
    else:
        _counts[at].rows.append((to, source, nbytes, _left(to, source, nbytes)))


_STARTED = ctypes.CFUNCTYPE(None, ctypes.c_void_p, ctypes.c_void_p, ctypes.c_void_p, ctypes.c_int32, ctypes.c_int32)(_started)
_WAITED = ctypes.CFUNCTYPE(None, ctypes.c_void_p, ctypes.c_int32)(_waited)
_COUNTED = ctypes.CFUNCTYPE(None, ctypes.c_void_p, ctypes.c_int32)(_counted)
_ROW = ctypes.CFUNCTYPE(None, ctypes.c_void_p, ctypes.c_void_p, ctypes.c_int32, ctypes.c_void_p)(_row)
for _name, _function in (("emulated_copy", _STARTED), ("emulated_wait", _WAITED), ("emulated_count", _COUNTED), ("emulated_row", _ROW)):
    llvm.add_symbol(_name, ctypes.cast(_function, ctypes.c_void_p).value)


class _Rewriter:
    """Rewrites the text of a module for the host. `sites`: the kind of each suspension point, numbered from 1."""

    def __init__(self, ir: str):
        self.sites: list[str] = [""]
        self.fresh = 0
        self.lines: list[str] = []
        self.pointers: dict[str, int] = {}      # kernel → how many of its arguments are addresses
        self.scratch: dict[str, int] = {}       # kernel → bytes of memory of its own of a thread
        self.declared: dict[str, int] = {}      # shared memory → bytes
        self.begins: dict[str, int] = {}        # and of what it begins at a multiple
        self.symbol = ""
        self.renamed: dict[str, str] = {}       # block → the last block that it was cut into
        self.block = ""
        ir = ir.replace("llvm.memcpy.p3.p1.i64(ptr addrspace(3), ptr addrspace(1)", "llvm.memcpy.p0.p0.i64(ptr, ptr")
        ir = ir.replace("llvm.memcpy.p3.p1.i64", "llvm.memcpy.p0.p0.i64")
        functions = re.split(r"(?m)^(?=define )", ir)
        head = [line for line in functions[0].splitlines() if not line.startswith("declare") or "llvm.nvvm" not in line]
        self.text = "\n".join([_DECLARATIONS, *map(self._global, head), *map(self._function, functions[1:])])

    def _global(self, line: str) -> str:
        declared = re.match(r"@(\S+) = internal addrspace\(3\) global \[(\d+) x i8\]", line)
        if declared:
            self.declared[declared[1]] = int(declared[2])
        begins = re.match(r"@(\S+) = \w+ addrspace\(3\) global .*, align (\d+)$", line)
        if begins:
            self.begins[begins[1]] = int(begins[2])
        line = re.sub(r"external addrspace\(3\) global \[0 x i8\]", f"global [{1 << 18} x i8] undef", line)
        return line.replace("internal addrspace(3) global", "global")

    def _name(self) -> str:
        self.fresh += 1
        return f"%emu{self.fresh}"

    def _function(self, text: str) -> str:
        self.lines, self.renamed, self.block = [], {}, "entry"
        header, *body = text.rstrip().splitlines()
        symbol, parameters = re.match(r"define ptx_kernel void @(\w+)\((.*)\) nounwind", header).groups()     # type: ignore[union-attr]
        self.symbol, self.pointers[symbol] = symbol, parameters.count("ptr addrspace(1)")
        parameters = re.sub(r"ptr addrspace\(1\)(?: noalias align 16)?", "ptr", parameters)
        self.lines.append(f"define ptr @{symbol}(ptr %ctx, {parameters}) presplitcoroutine {{")
        for line in body:
            self._line(line)
        lines = [self._renamed_phi(line) for line in self.lines]
        return "\n".join(lines)

    def _renamed_phi(self, line: str) -> str:
        if " = phi " not in line:
            return line
        return re.sub(r", %([\w.]+)\]", lambda m: f", %{self.renamed.get(m[1], m[1])}]", line)

    def _line(self, line: str) -> None:
        label = re.fullmatch(r"([\w.]+):", line)
        if line == "entry:":
            self.lines.append(_PROLOGUE)
        elif line == "  ret void":
            self.lines.append(_EPILOGUE)
        elif line == "}":
            pass
        elif label:
            self.block = label[1]
            self.lines.append(line)
        elif (call := _CALL.match(line) or _ASSEMBLY.match(line)) is not None:
            self._call(*call.groups())
        elif (bulk := _BULK.match(line)) is not None:
            self._bulk(bulk[2], re.sub(r" addrspace\(\d\)", "", bulk[3]), bulk[1])
        elif "asm sideeffect \"fence.proxy.async.shared::cta;\"" in line:
            self.lines.append(f"  store i32 1, ptr {self._word(FENCED)}")
        elif (memory := _SCRATCH.match(line)) is not None:
            self.scratch[self.symbol] = int(memory[1]) + int(memory[2])
            self.lines.append(f"  %scratch{memory[1]} = getelementptr i8, ptr %ctx, i64 {4 * WORDS + int(memory[1])}")
        elif (rounded := _BFLOAT.match(line)) is not None:
            self._bfloat(*rounded.groups())
        else:
            line = re.sub(r"addrspacecast \(ptr addrspace\(3\) (@[\w.]+) to ptr\)", r"\1", line)
            line = _SPACE.sub(r"= getelementptr i8, ptr \1, i64 0", line)
            self.lines.append(re.sub(r" addrspace\(\d\)", "", line))

    def _word(self, number: int) -> str:
        name = self._name()
        self.lines.append(f"  {name} = getelementptr i32, ptr %ctx, i64 {number}")
        return name

    def _call(self, result: str | None, type_: str, name: str, operands: str) -> None:
        if name.startswith("llvm.nvvm.read.ptx.sreg."):
            self.lines.append(f"  {result} = load i32, ptr {self._word(REGISTERS[name[24:]])}")
            return
        at = OPERANDS
        if name.startswith("llvm.nvvm.cp.async."):
            self._copy(name, operands)
            return
        if name == "llvm.nvvm.ex2.approx.ftz.f32":
            power, tiny, value = self._name(), self._name(), operands.removeprefix("float ")
            self.lines += [f"  {power} = call float @llvm.exp2.f32({operands})", f"  {tiny} = fcmp olt float {value}, -126.0",
                           f"  {result} = select i1 {tiny}, float 0.0, float {power}"]
            return
        if name == "llvm.nvvm.f2tf32.rna":
            bits, up = self._name(), self._name()
            self.lines += [f"  {bits} = bitcast {operands} to i32", f"  {up} = add i32 {bits}, 4096", f"  {result} = and i32 {up}, -8192"]
            return
        if name.startswith("llvm.nvvm.mbarrier."):
            at, *arrivals = operands.replace(" addrspace(3)", "").split(", i32 ")
            self.lines.append(f"  call void @emulated_count({at}, i32 {ARRIVED - int(arrivals[0]) if arrivals else INVALIDATE})")
            return
        values = [v.rsplit(" ", 1) for v in re.split(r", (?![^<{]*[>}])", operands)] if operands else []
        for kind, value in values:
            kind = kind.strip()
            self.lines.append(f"  store {kind.split(' addrspace')[0]} {value}, ptr {self._word(at)}, align 4")
            at += _WIDTH[kind] // 4
        self.sites.append(name if values else f"{name} of no registers")
        self.lines += [f"  store i32 {len(self.sites) - 1}, ptr {self._word(8)}"]
        n, resumed = self._name(), f"resumed{self.fresh}"
        self.lines += [f"  {n} = call i8 @llvm.coro.suspend(token none, i1 false)", f"  switch i8 {n}, label %coro.out [",
                       f"    i8 0, label %{resumed}", "    i8 1, label %coro.end]", f"{resumed}:"]
        self.renamed[self.block] = resumed
        if result:
            self.lines.append(f"  {result} = load {type_}, ptr {self._word(OPERANDS)}, align 4")

    def _bulk(self, assembly: str, operands: str, result: str | None) -> None:
        """Rewrite inline assembly with mbarriers."""
        if "try_wait" in assembly:
            self._call(result, "i32", TRY_WAIT, operands)
        elif assembly.startswith("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes"):
            self.lines.append(f"  call void @emulated_row({operands})")
        else:
            self.lines.append(f"  call void @emulated_count({operands if 'expect_tx' in assembly else f'{operands}, i32 {ARRIVED}'})")

    def _copy(self, name: str, operands: str) -> None:
        """Rewrite an asynchronous copy as a call of the host's `_started`, `_committed` or `_waited`."""
        operands = re.sub(r" addrspace\(\d\)", "", operands)
        size = re.search(r"\.global\.(\d+)(\.s)?$", name)
        if size:
            given = "" if size[2] else f", i32 {size[1]}"
            self.lines.append(f"  call void @emulated_copy(ptr %ctx, {operands}{given}, i32 {size[1]})")
        else:
            number = operands or "i32 -1"
            self.lines.append(f"  call void @emulated_wait(ptr %ctx, {number})")

    def _bfloat(self, result: str, wide: str, lanes: str | None, operand: str, short: str) -> None:
        """Rewrite a conversion of float to bfloat in integer arithmetic: the host may lack the instruction, or flush subnormals."""
        def of(scalar: str) -> str:
            return scalar if lanes is None else f"<{lanes} x {scalar}>"

        def all_of(value: str) -> str:
            return value if lanes is None else f"splat (i32 {value})"
        raw, odd, low, up, sum_, quiet, nan, chosen, high, bits = (self._name() for _ in range(10))
        word = of("i32")
        self.lines += [
            f"  {raw} = bitcast {wide} {operand} to {word}", f"  {odd} = lshr {word} {raw}, {all_of('16')}",
            f"  {low} = and {word} {odd}, {all_of('1')}", f"  {up} = add {word} {raw}, {all_of('32767')}",
            f"  {sum_} = add {word} {up}, {low}",
            f"  {quiet} = or {word} {raw}, {all_of('4194304')}", f"  {nan} = fcmp uno {wide} {operand}, {operand}",
            f"  {chosen} = select {of('i1')} {nan}, {word} {quiet}, {word} {sum_}", f"  {high} = lshr {word} {chosen}, {all_of('16')}",
            f"  {bits} = trunc {word} {high} to {of('i16')}", f"  {result} = bitcast {of('i16')} {bits} to {short}"]


class Emulated:
    """A module that is loaded in the host's memory."""

    def __init__(self, ir: str, seed: int = 0):
        self.rng = random.Random(seed)
        rewritten = _Rewriter(ir)
        self.sites, self.pointers, self.scratch = rewritten.sites, rewritten.pointers, rewritten.scratch
        self.declared, self.begins = rewritten.declared, rewritten.begins
        llvm.initialize_all_targets()
        llvm.initialize_all_asmprinters()
        triple = llvm.get_process_triple()
        machine = llvm.Target.from_triple(triple).create_target_machine(
            cpu=llvm.get_host_cpu_name(), features=llvm.get_host_cpu_features().flatten(), opt=1, codemodel="jitdefault")
        module = llvm.parse_assembly(rewritten.text)
        module.triple, module.data_layout = triple, str(machine.target_data)
        module.verify()
        options = llvm.create_pipeline_tuning_options(speed_level=1)
        builder = llvm.create_pass_builder(machine, options)
        builder.getModulePassManager().run(module, builder)
        self.engine = llvm.create_mcjit_compiler(module, machine)
        self.engine.finalize_object()

    def launch(self, symbol: str, grid: tuple[int, int], block: int, shared: int, numbers: Sequence[int]) -> None:
        """Run a grid of blocks, in any order. `shared`: bytes that the kernel does not declare; `numbers`: its arguments."""
        global _draws
        _draws = self.rng
        pointers = self.pointers[symbol]
        start = ctypes.CFUNCTYPE(ctypes.c_void_p, ctypes.c_void_p, *[ctypes.c_void_p] * pointers,
                                 *[ctypes.c_int64] * (len(numbers) - pointers))(self.engine.get_function_address(symbol))
        memory = self._shared(symbol, self.declared.get(f"{symbol}.shared", shared))
        begins = self.begins.get(f"{symbol}.shared", self.begins.get(DYNAMIC, 1))
        self.shared = None if memory is None else Shared(memory, memory.copy(), begins)
        order = list(range(grid[0] * grid[1]))
        self.rng.shuffle(order)
        for number in order:
            for content in self.shared[:2] if self.shared is not None else ():
                content.view(np.uint32)[:] = NAN
            self._run_block(start, numbers, block, self.scratch.get(symbol, 0), (number % grid[0], number // grid[0], grid[0]))

    def _shared(self, symbol: str, nbytes: int) -> Array | None:
        if not nbytes:
            return None
        name = next(n for n in (f"{symbol}.shared", DYNAMIC) if self.engine.get_global_value_address(n))
        return np.ctypeslib.as_array((ctypes.c_uint8 * (-(-nbytes // 4) * 4)).from_address(self.engine.get_global_value_address(name)))

    def _run_block(self, start: Callable[..., Any], numbers: Sequence[int], block: int, scratch: int, place: tuple[int, int, int]) -> None:
        words = WORDS + -(-scratch // 64) * 16
        raw = np.full(block * words + 16, NAN, np.uint32)
        contexts = raw[-(raw.ctypes.data // 4) % 16:][:block * words].reshape(block, words)
        contexts[:, 0] = np.arange(block)
        contexts[:, 1:4] = place
        for left in (_copies, _counts, _faults, _products, started, matrices):     # leftovers of a block that failed
            left.clear()
        base = contexts.ctypes.data
        handles = [0] * block
        for thread in self._order(range(block)):
            handles[thread] = start(base + thread * words * 4, *numbers)
        warps = [self._waiting(range(first, min(first + WARP, block)), handles) for first in range(0, block, WARP)]
        order = self._order(range(len(warps)))
        while any(warps):
            ready = next(filter(None, (self._of_warp(n, warps, contexts) for n in order)), None) or self._of_block(warps, contexts)
            for thread in self._order(ready):
                _resume(handles[thread], 0)
            for n in {t // WARP for t in ready}:
                warps[n] = self._waiting(warps[n], handles)
        for handle in handles:
            _resume(handle, 1)
        under_way = any(group for own in _copies.values() for group in own)
        _copies.clear()
        under_way |= any(count.rows for count in _counts.values())
        if _counts:
            _faults.append("an mbarrier is left in shared memory")
        _counts.clear()
        under_way |= any(own.groups for own in _products.values())
        if _faults or under_way:
            raise DeviceFault(_faults.pop() if _faults else "a thread ends while its copies or products are under way")

    def _order(self, threads: Sequence[int]) -> list[int]:
        shuffled = list(threads)
        self.rng.shuffle(shuffled)
        return shuffled

    @staticmethod
    def _waiting(threads: Sequence[int], handles: Sequence[int]) -> list[int]:
        """Return the threads that have not ended."""
        return [t for t in threads if ctypes.c_void_p.from_address(handles[t]).value]

    def _of_warp(self, number: int, warps: Sequence[list[int]], contexts: Array) -> list[int]:
        """Return the threads of a warp, or of its warpgroup, that can continue because all have arrived at a collective operation."""
        warp = warps[number]
        ready = self._at_mbarriers(warp, contexts)
        sites = {int(contexts[t, 8]) for t in warp}
        names = {self.sites[s] for s in sites}
        if ready or not warp or (len(sites) == 1 and names <= {BARRIER, TRY_WAIT}):
            return ready
        if any(name.startswith("wgmma") for name in names):
            return self._warpgroup(number * WARP // WARPGROUP * WARPGROUP, warps, contexts)
        if len(sites) > 1 or len(warp) < min(WARP, len(contexts) - number * WARP):
            raise DeviceFault(f"the threads of a warp wait at {', '.join(sorted(names))}, {len(sites)} places; {len(warp)} of them do")
        collective(names.pop(), contexts[warp[0]:warp[-1] + 1, OPERANDS:WORDS])
        return warp

    def _of_block(self, warps: Sequence[list[int]], contexts: Array) -> list[int]:
        """Return all threads, which wait at a barrier. Raises DeviceFault if some wait elsewhere."""
        waiting = [t for warp in warps for t in warp]
        sites = {int(contexts[t, 8]) for t in waiting}
        if any(self.sites[s] == TRY_WAIT for s in sites):
            raise DeviceFault("threads wait for ever at an mbarrier")
        if any(self.sites[s].startswith("wgmma") for s in sites):
            raise DeviceFault("some threads of a warpgroup wait at wgmma, others elsewhere")
        if len(sites) > 1 or len(waiting) < len(contexts):
            raise DeviceFault(f"{len(waiting)} of {len(contexts)} threads of a block wait at a barrier, at {len(sites)} places")
        if self.shared is not None and (contexts[:, FENCED] == 1).all():
            self.shared.fenced[:] = self.shared.content
        contexts[:, FENCED] = 0
        return waiting

    def _at_mbarriers(self, waiting: list[int], contexts: Array) -> list[int]:
        """Return the threads whose mbarrier phase has ended."""
        ready = []
        for t in waiting:
            if self.sites[int(contexts[t, 8])] == TRY_WAIT:
                low, high, parity = (int(word) for word in contexts[t, OPERANDS:OPERANDS + 3])
                count = _counts.get(low | high << 32)
                if count is None:
                    raise DeviceFault("a thread waits where there is no mbarrier")
                if count.has_ended(parity):
                    contexts[t, OPERANDS] = 1
                    ready.append(t)
        return ready

    def _warpgroup(self, first: int, warps: Sequence[list[int]], contexts: Array) -> list[int]:
        """Execute a wgmma if all threads of a warpgroup have arrived at it; returns these threads, with the results in their contexts."""
        threads = [t for warp in warps[first // WARP:(first + WARPGROUP) // WARP] for t in warp]
        if len(threads) < WARPGROUP or len({int(contexts[t, 8]) for t in threads}) > 1:
            return []
        assert self.shared is not None
        own = _products.setdefault(first, UnderWay())
        multiply_in_shared(self.sites[int(contexts[first, 8])], contexts[first:first + WARPGROUP, OPERANDS:WORDS], self.shared, own)
        return threads


def _resume(handle: int, destroy: int) -> None:
    """Resume a coroutine, or destroy it."""
    address = ctypes.c_void_p.from_address(handle + 8 * destroy).value
    assert address
    _RESUME(address)(handle)


_RESUME = ctypes.CFUNCTYPE(None, ctypes.c_void_p)


# -- what a warp does together -----------------------------------------------------------------------------
def collective(name: str, words: Array) -> None:
    """Execute a collective operation of a warp: replace the operands of its threads, 32-bit words, by the results."""
    if name == "llvm.nvvm.shfl.sync.bfly.i32":
        source = np.arange(len(words)) ^ words[:, 2].astype(np.int64)
        words[:, 0] = np.where(source < len(words), words[np.minimum(source, len(words) - 1), 1], words[:, 1])
    elif (lines := _LDMATRIX.fullmatch(name)) is not None:
        load_matrices(int(lines[1]), bool(lines[2]), words)
    elif (product := _MMA.fullmatch(name)) is not None:
        multiply_matrices(int(product[1]), int(product[2]), _KINDS[product[3]], words)
    else:
        raise DeviceFault(f"{name} is not emulated")


_LDMATRIX = re.compile(r"llvm\.nvvm\.ldmatrix\.sync\.aligned\.m8n8\.x(\d)(\.trans)?\.b16\.p3")
_MMA = re.compile(r"llvm\.nvvm\.mma\.m(8|16)n8k(\d+)\.row\.col\.([\w.]+)")
_KINDS: dict[str, tuple[str, Callable[[Array], Array]]] = {
    "bf16": ("float32", lambda words: (words.view(np.uint16).astype(np.uint32) << 16).view(np.float32).astype(np.float64)),
    "f32.f32": ("float32", lambda words: words.view(np.float16).astype(np.float64)),
    "s8": ("int32", lambda words: words.view(np.int8).astype(np.int64)),
    "tf32": ("float32", lambda words: (words & 0xFFFF_E000).view(np.float32).astype(np.float64)),
}
"""How a fragment's words are read as numbers, and the type of the results."""


def load_matrices(count: int, turned: bool, words: Array) -> None:
    """Execute ldmatrix: eight threads give the addresses of each matrix's lines; thread t gets elements 2·(t % 4) and 2·(t % 4) + 1 of row
    t // 4 of each matrix, or of its transpose."""
    addresses = np.ascontiguousarray(words[:, :2]).view(np.uint64)[:, 0]
    if any(int(a) % 16 for a in addresses[:8 * count]):
        raise DeviceFault("a line of ldmatrix does not begin at a multiple of 16 bytes")
    for j in range(count):
        matrices.append(addresses[8 * j:8 * j + 8])
        lines = np.array([np.ctypeslib.as_array((ctypes.c_uint16 * 8).from_address(int(a))) for a in addresses[8 * j:8 * j + 8]])
        matrix = np.ascontiguousarray(lines.T if turned else lines)
        words[:, j] = matrix.view(np.uint32).ravel()


def multiply_matrices(rows: int, depth: int, kind: tuple[str, Callable[[Array], Array]], words: Array) -> None:
    """Execute mma.m16n8k* and m8n8k16. The layouts follow the figures of "Matrix Fragments" in NVIDIA's PTX ISA, independently of svod's
    tables."""
    dtype, numbers = kind
    halves = rows // 8
    of_columns = depth * 8 // WARP // len(numbers(np.zeros(1, np.uint32)))
    of_rows = of_columns * halves
    a, b = np.zeros((rows, depth), object), np.zeros((depth, 8), object)
    c = np.zeros((rows, 8), np.float64 if dtype == "float32" else np.int64)
    for t in range(WARP):
        group, member = t // 4, t % 4
        for r in range(of_rows):
            held = numbers(np.ascontiguousarray(words[t, r:r + 1]))
            for e, x in enumerate(held):
                a[group + 8 * (r % halves), member * len(held) + e + 4 * len(held) * (r // halves)] = x
        for r in range(of_columns):
            held = numbers(np.ascontiguousarray(words[t, of_rows + r:of_rows + r + 1]))
            for e, x in enumerate(held):
                b[member * len(held) + e + 4 * len(held) * r, group] = x
        own = np.ascontiguousarray(words[t, of_rows + of_columns:of_rows + of_columns + 2 * halves]).view(dtype)
        for e in range(2 * halves):
            c[group + 8 * (e // 2), 2 * member + e % 2] = own[e]
    total = (c + a.astype(c.dtype) @ b.astype(c.dtype)).astype(dtype)
    for t in range(WARP):
        for e in range(2 * halves):
            words[t, e] = total[t // 4 + 8 * (e // 2), 2 * (t % 4) + e % 2].view(np.uint32)


_WGMMA = re.compile(r"wgmma\.mma_async\.sync\.aligned\.m64n(\d+)k(\d+)\.(f32|s32)\.(bf16|f16|s8)\.\4 \{([$\d, ]+)\}, \$(\d+), \$(\d+), p"
                    r"(?:, 1, 1, ([01]), ([01]))?;")
_NUMBERS: dict[str, tuple[Any, Callable[[Array], Array]]] = {
    "bf16": (np.uint16, lambda x: (x.astype(np.uint32) << 16).view(np.float32).astype(np.float64)),
    "f16": (np.float16, lambda x: x.astype(np.float64)), "s8": (np.int8, lambda x: x.astype(np.int64))}


class UnderWay:
    """The products of a warpgroup for which it has not waited. `groups`: for each committed group the shared memory that it reads, as
    (positions, content); `tiles`: the results that belong in registers with placeholders, by placeholder."""

    def __init__(self) -> None:
        self.groups: list[list[tuple[Array, Array]]] = []
        self.tiles: dict[bytes, tuple[int, Array]] = {}     # (number of the group, content)
        self.begun = 0

    def tile(self, held: Array) -> Array:
        """Return the content of a tile, whose registers may be placeholders of unfinished products."""
        return self.tiles.get(held.tobytes(), (0, held))[1]

    def hidden(self, content: Array) -> Array:
        """Return placeholders for the registers of a tile of the last committed group while its products are unfinished."""
        held = np.random.default_rng(self.begun + len(self.tiles)).integers(1 << 32, size=content.shape, dtype=np.uint32)
        self.tiles[held.tobytes()] = self.begun, content
        return held

    def wait(self, left: int, memory: Shared) -> None:
        """Wait until at most this many groups are unfinished. Raises DeviceFault if shared memory that a finished group reads has
        changed."""
        while len(self.groups) > left:
            for places, content in self.groups.pop(0):
                if (memory.content[places] != content).any():
                    raise DeviceFault("shared memory changes that a product under way reads")

    def done(self, held: Array) -> Array:
        """Return the result of a tile whose products have been waited for."""
        number, content = self.tiles.get(held.tobytes(), (0, held))
        if number > self.begun - len(self.groups):
            raise DeviceFault("a tile is used while its products are under way")
        return content


_products: dict[int, UnderWay] = {}     # key: first thread of a warpgroup
SWIZZLE = 0, 128, 64, 32     # bytes, by the two highest bits of a descriptor
# The rest is 0, the base offset too: patterns begin where they repeat. The start has 14 bits, and a carry here: the host's memory may lie
# across a multiple of 256 KB, a GPU's begins at 0.
FIELDS = 3 << 62 | 0x3FFF << 32 | 0x3FFF << 16 | 0x7FFF


def operand_in_shared(descriptor: int, shape: tuple[int, int], kind: str, turned: bool, memory: Shared) -> tuple[Array, Array]:
    """Read the operand that a descriptor describes: returns its byte positions in shared memory, and its matrix, with a row for each row of
    the result and a column for each summed position ("Matrix Descriptor Format", "Strides" and "Canonical Layouts" in NVIDIA's PTX ISA).
    Addresses in a descriptor have 18 bits. Swizzling XORs bits 4, 5 and 6 of an address with its bits 7, 8 and 9."""
    start, leading, stride = ((descriptor >> at & 0x3FFF) << 4 for at in (0, 16, 32))
    if descriptor & ~FIELDS:
        raise DeviceFault("a descriptor with other fields")
    width = SWIZZLE[descriptor >> 62]
    dtype, numbers = _NUMBERS[kind]
    size = np.dtype(dtype).itemsize
    row, depth = np.indices(shape)
    at = (start - memory.content.ctypes.data) & 0x3FFFF
    if width and (memory.begins % (8 * width) or at % (8 * width) >= (1 if turned else width)):
        raise DeviceFault("an operand with swizzle begins inside a pattern")
    if width and not turned and at % width + shape[1] * size > width:
        raise DeviceFault("an operand with swizzle goes beyond a row")
    if turned:
        inner = row * size
        places = inner // width * leading + inner % width + depth // 8 * stride + depth % 8 * width if width else \
            inner // 16 * stride + inner % 16 + depth // 8 * leading + depth % 8 * 16
    else:
        inner = depth * size
        places = row // 8 * stride + row % 8 * (width or 16) + (inner if width else inner // 16 * leading + inner % 16)
    places = places + at
    places ^= (places >> 7 & max(0, width // 16 - 1)) << 4
    lines = places[::16 // size].T if turned else places[:, ::16 // size]       # first bytes of lines; groups of eight are consecutive
    matrices.extend(lines.reshape(-1, 8, lines.shape[1]).transpose(0, 2, 1).reshape(-1, 8))
    if places.max() + size > memory.fenced.size:
        raise DeviceFault("an operand goes beyond shared memory")
    nbytes = places[..., None] + np.arange(size)
    return nbytes, numbers(np.ascontiguousarray(memory.fenced[nbytes]).view(dtype)[..., 0])


WIDTHS = (4, 8, 16, 32, 64, 128)       # registers of a thread for a tile
_WAIT = re.compile(r"wgmma\.wait_group\.sync\.aligned (\d+);")


def multiply_in_shared(assembly: str, words: Array, memory: Shared, own: UnderWay) -> None:
    """Execute one asm statement: wgmma instructions between fence and commit_group, possibly followed by wait_group; or a wait_group alone,
    whose operands are the registers of a tile. The operands of products are the descriptors, then the registers of the tiles. Thread t of
    the warpgroup has of each tile the rows 16·(t // 32) + t % 32 // 4 and 8 more, and of every eight columns 2·(t % 4) and the next one."""
    wait = _WAIT.search(assembly)
    if wait is not None and assembly.startswith(wait[0]):
        own.wait(int(wait[1]), memory)
        if assembly != wait[0]:
            return
        known = next((n for n in WIDTHS if words[:, :n].tobytes() in own.tiles), 0)
        words[:, :known] = own.done(np.ascontiguousarray(words[:, :known]))
        return
    pieces = [m.groups() for m in _WGMMA.finditer(assembly)]
    rest = _WAIT.sub("", _WGMMA.sub("", assembly)).split()
    if rest != ["wgmma.fence.sync.aligned;", "wgmma.commit_group.sync.aligned;"]:
        raise DeviceFault(f"wgmma among {rest}")
    descriptors = 2 * len(pieces)
    tiles = list(dict.fromkeys(tuple(int(r) for r in re.findall(r"\d+", registers)) for _, _, _, _, registers, *_ in pieces))
    count = 1 + max(map(max, tiles))
    given = np.ascontiguousarray(words[:, 2 * descriptors:2 * descriptors + count])
    named = np.ascontiguousarray(words[:, :2 * descriptors]).view(np.uint64)
    if (named != named[0]).any():
        raise DeviceFault("the threads of a warpgroup have different descriptors")
    thread, reads = np.arange(WARPGROUP)[:, None], list[tuple[Array, Array]]()
    held = {tile: own.tile(np.ascontiguousarray(given[:, tile])) for tile in tiles}
    for columns, depth, total, kind, registers, a, b, turned_a, turned_b in pieces:
        tile = tuple(int(r) for r in re.findall(r"\d+", registers))
        k = np.arange(len(tile))[None]
        rows, across = thread // 32 * 16 + thread % 32 // 4 + k % 4 // 2 * 8, k // 4 * 8 + thread % 4 * 2 + k % 2
        at_left, left = operand_in_shared(int(named[0, int(a) - count]), (64, int(depth)), kind, turned_a == "1", memory)
        at_right, right = operand_in_shared(int(named[0, int(b) - count]), (int(columns), int(depth)), kind, turned_b == "1", memory)
        reads += [(at, memory.content[at]) for at in (at_left, at_right)]
        dtype = np.dtype(np.float32 if total == "f32" else np.int32)
        product = (left @ right.T)[rows, across]
        if len(tile) != int(columns) // 2:
            raise DeviceFault(f"{len(tile)} registers for {columns} columns")
        held[tile] = (held[tile].view(dtype).astype(product.dtype) + product).astype(dtype).view(np.uint32)
    own.groups.append(reads)
    own.begun += 1
    if wait is not None:
        own.wait(int(wait[1]), memory)
    for tile, content in held.items():
        words[:, tile] = content if wait is not None and wait[1] == "0" else own.hidden(content)


def run_program(program: Program, target: Target, args: Sequence[Array], variables: Mapping[str, int] | None = None, seed: int = 0) -> None:
    """Run the phases of a program in order over flat arrays by slot; outputs are written in place."""
    source, temps, values = render(program, target), poisoned_temporaries(program), dict(variables or {})
    addresses = [a.ctypes.data for a in (*args, *temps)]
    module = Emulated(without_assumptions(source) if any(a % 16 for a in addresses) else source, seed)
    numbers = [*addresses, *(values[name] for name in program.spec.variables)]
    for phase in program.spec.phases:
        end = phase.extent_at(values)
        if end:
            module.launch(phase.symbol, grid_of(phase, end), block_of(phase), dynamic_bytes(phase), [*numbers, 0, end])
