"""Asynchronous copies from arguments to shared memory as LLVM text.

    COPY_ASYNC of 16 bytes                    cp.async.cg, which bypasses the L1 cache
    COPY_ASYNC of 4 or 8                      cp.async.ca
    … at an address of unknown alignment      a load and a store
    … with a condition `inside`               copies the bytes if it is true, otherwise writes zeros
    COMMIT, WAIT                              cp.async.commit_group, cp.async.wait_group
    BULK_BEGIN, BULK_END                      mbarrier.init and mbarrier.inval for each buffer, by the first thread of a block
    COPY_BULK                                 mbarrier.arrive.expect_tx with the bytes of a row, cp.async.bulk
    BULK_WAIT                                 mbarrier.try_wait.parity in a loop until it succeeds

Each thread that copies a row arrives at the mbarrier with the number of bytes that it expects. So a phase of the mbarrier ends when the
threads of all rows have arrived and the bytes of all rows are there.
"""
from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

from svod.compile.cuda.matrix import THREAD
from svod.compile.llvm.memory import Handler, address_of
from svod.compile.llvm.text import LlvmWriter, memory_type
from svod.core.ir.dtype import DType

COPY_PREFIX = "llvm.nvvm.cp.async."
CACHED = {4: "ca.shared.global.4", 8: "ca.shared.global.8", 16: "cg.shared.global.16"}


def _copy(w: LlvmWriter, i: int, dtype: DType, lanes: int, src: tuple[int, ...], arg: Any) -> None:
    to, to_index, source, index, stores, inside = src
    to_offset, offset = arg
    vec, nbytes = memory_type(dtype.name, lanes), lanes * dtype.itemsize
    # computed before any branch, so that later accesses can reuse them
    target, align = address_of(w, to, to_index, to_offset), w.family.alignment(w, to, to_index, to_offset, lanes)
    origin, origin_align = address_of(w, source, index, offset), w.family.alignment(w, source, index, offset, lanes)
    if min(align, origin_align) < nbytes:
        def loaded() -> str:
            return w.line(f"store {vec} {w.temp(f'load {vec}, ptr {origin}, align {origin_align}')}, ptr {target}, align {align}")

        def zeros() -> str:
            return w.line(f"store {vec} zeroinitializer, ptr {target}, align {align}")
        _where(w, stores, lambda: _where(w, inside, loaded, zeros))
    else:
        _where(w, stores, lambda: _copied(w, nbytes, target, origin, inside))


def _where(w: LlvmWriter, condition: int, then: Callable[[], str], other: Callable[[], str] = str) -> str:
    """Write a branch: the code of `then` if a condition holds, otherwise the code of `other`. If the condition is constant, write only one
    of them."""
    if w.code[condition].op == "CONST":
        return (then if w.code[condition].arg else other)()
    return w.either(w.value[condition], then, None if other is str else other)


def _copied(w: LlvmWriter, nbytes: int, target: str, origin: str, inside: int) -> str:
    """Write a copy of `nbytes` bytes between aligned addresses. `inside`: number of the condition's instruction; if it is false, zeros
    are written and nothing is read."""
    always = w.code[inside].op == "CONST" and bool(w.code[inside].arg)
    given = [] if always else [("i32", w.temp(f"select i1 {w.value[inside]}, i32 {nbytes}, i32 0"))]
    shared, argument = w.temp(f"addrspacecast ptr {target} to {SHARED}"), w.temp(f"addrspacecast ptr {origin} to {GLOBAL}")
    return w.call("void", COPY_PREFIX + CACHED[nbytes] + ("" if always else ".s"), (SHARED, shared), (GLOBAL, argument), *given)


_COPY = re.compile(r"  call void @llvm\.nvvm\.cp\.async\.c[ag]\.shared\.global\.(\d+)(?:\.s)?"
                   r"\((ptr addrspace\(3\) %\w+), (ptr addrspace\(1\) %\w+)(?:, i32 (%?\w+))?\)")
MASKED = "llvm.masked.load.v{0}i8.p1"
SHARED, GLOBAL = "ptr addrspace(3)", "ptr addrspace(1)"
EXPECT = "mbarrier.arrive.expect_tx.shared::cta.b64 _, [$0], $1;"
BULK_COPY = "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [$0], [$1], $2, [$3];"
ARRIVE = "mbarrier.arrive.shared::cta.b64 _, [$0];"
TRY = "{ .reg .pred p; mbarrier.try_wait.parity.shared::cta.b64 p, [$1], $2; selp.b32 $0, 1, 0, p; }"
PROXY_FENCE = "fence.proxy.async.shared::cta;"
MEMCPY = "llvm.memcpy.p3.p1.i64"
_ROW = re.compile(r'  call void asm sideeffect "' + re.escape(EXPECT) + r'".*\n  call void asm sideeffect "' + re.escape(BULK_COPY)
                  + r'", "[^"]*"\((ptr addrspace\(3\) %\w+), (ptr addrspace\(1\) %\w+), i32 (\d+), (ptr addrspace\(3\) %\w+)\)')


def by_bytes(source: str) -> str:
    """Replace asynchronous copies in the text by loads and stores that require no alignment."""
    numbers = iter(range(source.count(COPY_PREFIX)))

    def row(m: re.Match[str]) -> str:
        arrived = f'  call void asm sideeffect "{ARRIVE}", "l,~{{memory}}"({m[4]})'
        return f"  call void @{MEMCPY}({m[1]}, {m[2]}, i64 {m[3]}, i1 false)\n{arrived}"
    if EXPECT in source:
        source = f"declare void @{MEMCPY}(ptr addrspace(3), ptr addrspace(1), i64, i1)\n" + _ROW.sub(row, source)

    masked: set[str] = set()

    def one(m: re.Match[str]) -> str:
        n, (width, to, origin, given) = next(numbers), m.groups()
        loaded = f"load <{width} x i8>, {origin}, align 1"
        lines = []
        if given:
            masked.add(f"declare <{width} x i8> @{MASKED.format(width)}(ptr addrspace(1), i32, <{width} x i1>, <{width} x i8>)\n")
            lines = [f"  %given{n} = icmp ne i32 {given}, 0",
                     f"  %first{n} = insertelement <{width} x i1> poison, i1 %given{n}, i32 0",
                     f"  %all{n} = shufflevector <{width} x i1> %first{n}, <{width} x i1> poison, <{width} x i32> zeroinitializer"]
            loaded = (f"call <{width} x i8> @{MASKED.format(width)}({origin}, i32 1, <{width} x i1> %all{n}, "
                      f"<{width} x i8> zeroinitializer)")
        return "\n".join([*lines, f"  %bytes{n} = {loaded}", f"  store <{width} x i8> %bytes{n}, {to}, align 1"])
    text = _COPY.sub(one, source)
    return "".join(sorted(masked)) + text


def _commit(w: LlvmWriter, i: int, dtype: DType, lanes: int, src: tuple[int, ...], arg: Any) -> None:
    w.call("void", f"{COPY_PREFIX}commit.group")


def _wait(w: LlvmWriter, i: int, dtype: DType, lanes: int, src: tuple[int, ...], arg: Any) -> None:
    w.call("void", f"{COPY_PREFIX}wait.group", ("i32", str(arg)))


def _in_shared(w: LlvmWriter, address: str) -> str:
    return w.temp(f"addrspacecast ptr {address} to {SHARED}")


def _counts(w: LlvmWriter, i: int, dtype: DType, lanes: int, src: tuple[int, ...], arg: Any) -> None:
    begins = w.code[i].op == "BULK_BEGIN"
    given = [("i32", str(arg[1]))] if begins else []

    def each() -> str:
        for k in range(arg[0] if begins else arg):
            count = _in_shared(w, w.temp(f"getelementptr i64, ptr {w.value[src[0]]}, i64 {k}"))
            w.call("void", f"llvm.nvvm.mbarrier.{'init' if begins else 'inval'}.shared", (SHARED, count), *given)
        return ""
    w.either(w.temp(f"icmp eq i32 {w.call('i32', THREAD)}, 0"), each)       # only the first thread of a block
    if begins:      # executed by every thread: orders its own earlier writes to that memory before asynchronous ones
        w.line(f'call void asm sideeffect "{PROXY_FENCE}", "~{{memory}}"()')


def _copy_row(w: LlvmWriter, i: int, dtype: DType, lanes: int, src: tuple[int, ...], arg: Any) -> None:
    to, to_index, source, index, stores, counts, number = src
    nbytes = lanes * dtype.itemsize
    places = address_of(w, to, to_index, arg[0]), address_of(w, source, index, arg[1]), address_of(w, counts, number, 0)

    def copied() -> str:
        target, count = _in_shared(w, places[0]), _in_shared(w, places[2])
        origin = w.temp(f"addrspacecast ptr {places[1]} to ptr addrspace(1)")
        w.lines += [f'  call void asm sideeffect "{EXPECT}", "l,r,~{{memory}}"({SHARED} {count}, i32 {nbytes})',
                    f'  call void asm sideeffect "{BULK_COPY}", "l,l,r,l,~{{memory}}"'
                    f"({SHARED} {target}, ptr addrspace(1) {origin}, i32 {nbytes}, {SHARED} {count})"]
        return ""
    _where(w, stores, copied)


def _wait_rows(w: LlvmWriter, i: int, dtype: DType, lanes: int, src: tuple[int, ...], arg: Any) -> None:
    counts, number, parity = src
    count = _in_shared(w, address_of(w, counts, number, 0))
    value = w.value[parity]
    wanted = value if w.code[parity].dtype.bits == 32 else w.temp(f"trunc i64 {value} to i32")
    again, behind = w.fresh_label("wait"), w.fresh_label("behind")
    w.lines.append(f"  br label %{again}")
    w.label(again)
    done = w.temp(f'call i32 asm sideeffect "{TRY}", "=r,l,r,~{{memory}}"({SHARED} {count}, i32 {wanted})')
    w.lines.append(f"  br i1 {w.temp(f'icmp eq i32 {done}, 0')}, label %{again}, label %{behind}")
    w.label(behind)


HANDLERS: dict[str, Handler] = {"COPY_ASYNC": _copy, "COMMIT": _commit, "WAIT": _wait, "BULK_BEGIN": _counts, "BULK_END": _counts,
                                "COPY_BULK": _copy_row, "BULK_WAIT": _wait_rows}
