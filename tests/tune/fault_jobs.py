"""Jobs that fail in the ways in which candidates fail. The tests of children and executors run them in worker processes."""
from __future__ import annotations

import ctypes
import gc
import os
import sys
import time
from typing import Any

from svod.errors import DeviceLost

PRELOADED = ("numpy", "llvmlite.binding", "svod.compile.cpu.backend")


def echo(item: Any, state: Any) -> Any:
    return item


def add_state(item: int, state: dict[str, int]) -> dict[str, int]:
    state["count"] += 1
    return {"sum": item + state["base"], "count": state["count"], "pid": os.getpid()}


def add_state_setup(payload: int) -> dict[str, int]:
    if payload == -1:
        raise ValueError("setup refuses")
    if payload == -2:
        os.abort()
    return {"base": payload, "count": 0}


def fault(item: str, state: Any) -> Any:
    """Commit the fault that `item` names."""
    return FAULTS[item]()


def fault_or_add(item: str | int, state: dict[str, int]) -> Any:
    return FAULTS[item]() if isinstance(item, str) else add_state(item, state)


fault_or_add_setup = add_state_setup


def facts(item: None, state: Any) -> dict[str, Any]:
    """Facts about the process, for tests of limits and isolation."""
    import resource
    import signal
    return {"pid": os.getpid(), "ppid": os.getppid(), "modules": [m for m in PRELOADED if m in sys.modules],
            "young": gc.get_threshold()[0],
            "main": getattr(sys.modules["__main__"], "__file__", None), "core": resource.getrlimit(resource.RLIMIT_CORE)[0],
            "sigint_ignored": signal.getsignal(signal.SIGINT) is signal.SIG_IGN, "stdin": os.read(0, 10), "nice": os.nice(0)}


def kill_parent(item: None, state: Any) -> None:
    """Kill the fork server, as the system may do when memory runs out."""
    import signal
    os.kill(os.getppid(), signal.SIGKILL)
    time.sleep(60)


def kill_parent_once(item: str, state: Any) -> None:
    """Kill the fork server the first time; a file remembers that it was done."""
    try:
        os.close(os.open(item, os.O_CREAT | os.O_EXCL))
    except FileExistsError:
        return
    kill_parent(None, state)


def wait_for(item: str, state: Any) -> None:
    """Return once a file exists."""
    while not os.path.exists(item):
        time.sleep(0.005)


def meet(item: tuple[str, int], state: Any) -> None:
    """Return once the given number of items with this path have begun."""
    path, number = item
    fd = os.open(path, os.O_CREAT | os.O_WRONLY | os.O_APPEND)
    os.write(fd, b".")
    os.close(fd)
    while os.path.getsize(path) < number:
        time.sleep(0.005)


def stop(item: int, state: Any) -> None:
    """Stop a process, and hang."""
    import signal
    os.kill(item, signal.SIGSTOP)
    time.sleep(60)


def sleep(item: float, state: Any) -> float:
    time.sleep(item)
    return item


def _interval(item: float, state: Any) -> tuple[float, float]:
    begin = time.monotonic()
    time.sleep(item)
    return begin, time.monotonic()


interval = _interval


def step(item: float, state: Any) -> str:
    """Spin in native code inside a step of `item` seconds."""
    from svod.tune.workers.child import step_limit
    with step_limit(60.0):
        pass
    with step_limit(item):
        FAULTS["spin native"]()
    return "not reached"


def short_step(item: float, state: Any) -> str:
    from svod.tune.workers.child import step_limit
    with step_limit(item):
        pass
    time.sleep(2 * item)
    return "done"


def _spin_python() -> None:
    while True:
        pass


def _spin_native() -> None:
    """An endless loop in machine code, called without releasing the GIL."""
    import llvmlite.binding as llvm
    llvm.initialize_native_target()
    llvm.initialize_native_asmprinter()
    module = llvm.parse_assembly("""
        define void @spin() {
        entry:
          br label %loop
        loop:
          call void asm sideeffect "", ""()
          br label %loop
        }""")
    machine = llvm.Target.from_default_triple().create_target_machine()
    with llvm.create_mcjit_compiler(module, machine) as engine:
        engine.finalize_object()
        ctypes.PYFUNCTYPE(None)(engine.get_function_address("spin"))()


def _stack_overflow() -> None:
    """Recursion through C, which Python's own limit does not count once it is raised."""
    kind = ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_void_p, ctypes.c_void_p)
    qsort = ctypes.CDLL(None).qsort

    def again(a: Any, b: Any) -> int:
        qsort(ctypes.create_string_buffer(b"ba"), 2, 1, compare)
        return 0

    compare = kind(again)
    sys.setrecursionlimit(1 << 30)
    again(None, None)


def leave_garbage(megabytes: int, state: Any) -> None:
    """Leave garbage that only a garbage collection frees."""
    cycle: list[Any] = [bytearray(b"x") * (megabytes << 20)]
    cycle.append(cycle)


def take_memory(megabytes: int, state: Any) -> int:
    return len(bytearray(b"x") * (megabytes << 20)) >> 20


def _memory_hog() -> None:
    kept = []
    while True:
        kept.append(bytearray(b"x" * (64 << 20)))


def _recurse() -> list[Any]:
    nested: list[Any] = []
    for _ in range(100_000):
        nested = [nested]
    return nested


def _bad_text() -> None:
    class Unprintable(Exception):
        def __str__(self) -> str:
            raise RuntimeError
    raise Unprintable


def _print_forever() -> None:
    while True:
        print("x" * 100_000, flush=True)


def _close_everything() -> None:
    os.closerange(3, 1000)
    time.sleep(60)


def _write_garbage() -> None:
    """Overwrite the worker's answer, as a kernel that writes outside of its buffers might."""
    for fd in range(3, 50):
        try:
            os.write(fd, b"\xff" * 64)
        except OSError:
            continue
    time.sleep(60)


def _message_then_abort() -> None:
    os.write(2, b"LLVM ERROR: Cannot select intrinsic %llvm.exp\n")
    os.abort()


def _raise(e: BaseException) -> None:
    raise e


FAULTS: dict[str, Any] = {
    "raise": lambda: _raise(ValueError("no such tile")),
    "raise exit": lambda: sys.exit(3),
    "raise interrupt": lambda: _raise(KeyboardInterrupt()),
    "raise lost": lambda: _raise(DeviceLost("an illegal memory access")),
    "raise unprintable": _bad_text,
    "raise memory": lambda: _raise(MemoryError()),
    "unpicklable": lambda: (lambda: None),
    "object": lambda: object(),
    "numpy": lambda: __import__("numpy").float64(1.0),
    "nested": _recurse,
    "large": lambda: b"\x07" * (20 << 20),
    "too large": lambda: b"x" * ((256 << 20) + 1),
    "print": lambda: print("candidate says hello"),
    "read stdin": lambda: sys.stdin.read(),
    "segfault": lambda: ctypes.string_at(0),
    "abort": _message_then_abort,
    "stack overflow": _stack_overflow,
    "exit": lambda: os._exit(7),
    "exit 0": lambda: os._exit(0),
    "memory": _memory_hog,
    "garbage": _write_garbage,
    "close": _close_everything,
    "sleep": lambda: time.sleep(60),
    "spin python": _spin_python,
    "spin native": _spin_native,
    "print forever": _print_forever,
}
