"""Asynchronous copies from arguments to shared memory as LLVM text.

    COPY_ASYNC of 16 bytes                    cp.async.cg, past the first cache
    COPY_ASYNC of 4 or 8                      cp.async.ca
    … at an address that is not known to be a multiple of as many bytes       a load and a store
    … where `inside` is false                 a store of zeros
    COMMIT, WAIT                              cp.async.commit_group, cp.async.wait_group
"""
from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

from svod.compile.llvm.memory import Handler, address_of
from svod.compile.llvm.text import Writer, memory_type
from svod.core.ir.dtype import DType

PREFIX = "llvm.nvvm.cp.async."
CACHED = {4: "ca.shared.global.4", 8: "ca.shared.global.8", 16: "cg.shared.global.16"}


def _copy(w: Writer, i: int, dtype: DType, lanes: int, src: tuple[int, ...], arg: Any) -> None:
    to, to_index, source, index, stores, inside = src
    to_offset, offset = arg
    vec, nbytes = memory_type(dtype.name, lanes), lanes * dtype.itemsize
    # before any branch: later accesses share them
    target, align = address_of(w, to, to_index, to_offset), w.family.alignment(w, to, to_index, to_offset, lanes)
    origin, origin_align = address_of(w, source, index, offset), w.family.alignment(w, source, index, offset, lanes)

    def copied() -> None:
        _copied(w, vec, nbytes, (target, align), (origin, origin_align))

    def zeros() -> None:
        w.lines.append(f"  store {vec} zeroinitializer, ptr {target}, align {align}")
    _either(w, stores, lambda: _either(w, inside, copied, zeros), lambda: None)


def _either(w: Writer, condition: int, then: Callable[[], None], other: Callable[[], None]) -> None:
    """Do `then` where a condition holds, else `other`; one of them where it is known."""
    if w.code[condition].op == "CONST":
        (then if w.code[condition].arg else other)()
        return
    holds, fails, behind = (w.fresh_label(kind) for kind in ("holds", "fails", "behind"))
    w.lines.append(f"  br i1 {w.value[condition]}, label %{holds}, label %{fails}")
    for label, body in ((holds, then), (fails, other)):
        w.label(label)
        body()
        w.lines.append(f"  br label %{behind}")
    w.label(behind)


def _copied(w: Writer, vec: str, nbytes: int, target: tuple[str, int], origin: tuple[str, int]) -> None:
    """A copy between addresses, each with its alignment."""
    (to, to_align), (source, align) = target, origin
    if min(align, to_align) < nbytes:
        w.lines.append(f"  store {vec} {w.temp(f'load {vec}, ptr {source}, align {align}')}, ptr {to}, align {to_align}")
        return
    name = PREFIX + CACHED[nbytes]
    w.declared.add(f"declare void @{name}(ptr addrspace(3), ptr addrspace(1))")
    shared, argument = w.temp(f"addrspacecast ptr {to} to ptr addrspace(3)"), w.temp(f"addrspacecast ptr {source} to ptr addrspace(1)")
    w.lines.append(f"  call void @{name}(ptr addrspace(3) {shared}, ptr addrspace(1) {argument})")


_COPY = re.compile(r"  call void @llvm\.nvvm\.cp\.async\.c[ag]\.shared\.global\.(\d+)"
                   r"\((ptr addrspace\(3\) %\w+), (ptr addrspace\(1\) %\w+)\)")


def by_bytes(source: str) -> str:
    """The text with asynchronous copies as loads and stores, from addresses that are a multiple of nothing."""
    numbers = iter(range(source.count(PREFIX)))

    def one(m: re.Match[str]) -> str:
        n = next(numbers)
        return f"  %bytes{n} = load <{m[1]} x i8>, {m[3]}, align 1\n  store <{m[1]} x i8> %bytes{n}, {m[2]}, align 1"
    return _COPY.sub(one, source)


def _commit(w: Writer, i: int, dtype: DType, lanes: int, src: tuple[int, ...], arg: Any) -> None:
    w.declared.add(f"declare void @{PREFIX}commit.group()")
    w.lines.append(f"  call void @{PREFIX}commit.group()")


def _wait(w: Writer, i: int, dtype: DType, lanes: int, src: tuple[int, ...], arg: Any) -> None:
    w.declared.add(f"declare void @{PREFIX}wait.group(i32)")
    w.lines.append(f"  call void @{PREFIX}wait.group(i32 {arg})")


HANDLERS: dict[str, Handler] = {"COPY_ASYNC": _copy, "COMMIT": _commit, "WAIT": _wait}
