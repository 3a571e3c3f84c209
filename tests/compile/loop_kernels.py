"""Small native kernels over int64 arrays for tests of pool and plan, from LLVM IR text (signature: svod/compile/lower/program.py)."""
import threading
from functools import cache

from svod.compile.cpu.host import host_target
from svod.compile.llvm.codegen import compile_object
from svod.compile.llvm.loaded import LoadedProgram
from svod.compile.lower.program import PhaseSpec, ProgramSpec
from svod.core.ir.dtype import dtypes

_LOOP = """
define void @{name}(ptr %args, ptr %vars, ptr %scratch, i64 %begin, i64 %end) {{
entry:
{setup}
  br label %head
head:
  %i = phi i64 [ %begin, %entry ], [ %next, %body ]
  %go = icmp slt i64 %i, %end
  br i1 %go, label %body, label %done
body:
{body}
  %next = add i64 %i, 1
  br label %head
done:
  ret void
}}
"""


def _pointer(slot: int) -> str:
    return f"  %s{slot} = getelementptr ptr, ptr %args, i64 {slot}\n  %a{slot} = load ptr, ptr %s{slot}"


def _load(slot: int) -> str:
    return f"  %p{slot} = getelementptr i64, ptr %a{slot}, i64 %i\n  %v{slot} = load i64, ptr %p{slot}"


@cache
def _code() -> bytes:
    three, two = ("\n".join(map(_pointer, range(n))) for n in (3, 2))
    store = "  %p0 = getelementptr i64, ptr %a0, i64 %i\n  store i64 %r, ptr %p0"
    return compile_object("\n".join([
        _LOOP.format(name="count", setup=_pointer(0), body=f"{_load(0)}\n  %r = add i64 %v0, 1\n  store i64 %r, ptr %p0"),
        _LOOP.format(name="affine", setup=two, body=f"{_load(1)}\n  %m = mul i64 %v1, 3\n  %r = add i64 %m, 1\n{store}"),
        _LOOP.format(name="sum", setup=three, body=f"{_load(1)}\n{_load(2)}\n  %r = add i64 %v1, %v2\n{store}"),
        _LOOP.format(name="addvar", setup=f"{two}\n  %var = load i64, ptr %vars", body=f"{_load(1)}\n  %r = add i64 %v1, %var\n{store}"),
        _LOOP.format(name="scratch", setup=_pointer(0),
                     body=f"  store volatile i64 %i, ptr %scratch\n  %r = load volatile i64, ptr %scratch\n{store}"),
        _LOOP.format(name="touch", setup=_pointer(0), body=f"  %r = ptrtoint ptr %scratch to i64\n{store}"),
    ]), host_target())


_lock = threading.Lock()
_loaded: dict[tuple[str, ...], LoadedProgram] = {}


def loaded(*names: str) -> LoadedProgram:
    """Load the kernels. count: a0[i] += 1. affine: a0[i] = a1[i] * 3 + 1. sum: a0[i] = a1[i] + a2[i]. addvar: a0[i] = a1[i] + vars[0].
    scratch: writes i to scratch, reads it again, and stores it to a0[i]. touch: a0[i] = address of scratch."""
    with _lock:             # if two threads made the program, the code of one would be freed with its object
        if names not in _loaded:
            _loaded[names] = LoadedProgram(_code(), names)
        return _loaded[names]


def address(name: str) -> int:
    return loaded(name).addresses[0]


def spec(name: str, extent: int, threads: int = 1, *, slots: int = 1, temps: tuple[int, ...] = (), scratch: int = 0,
         variables: tuple[str, ...] = ()) -> ProgramSpec:
    """Make the spec of a program with one phase over int64 buffers of `extent` elements, which writes slot 0."""
    return ProgramSpec(name, ((dtypes.int64, extent),) * slots, (0,), temps, (PhaseSpec(name, extent, threads, scratch),), variables)
