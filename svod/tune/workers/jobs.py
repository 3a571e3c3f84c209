"""What travels between the search and its workers: jobs by name, plain data, outcomes, and who each end is.

A *job* is a function named by import path, `"svod.tune.measure.work:compile_candidate"`, from `svod.tune.measure.work` or
a module that `WorkerConfig.job_modules` adds. It is called as `function(item, state)`. A job that keeps something between items (inputs,
a reference result) has a companion `function_setup(payload)`, here `compile_candidate_setup`, whose result is `state`; a worker calls it
once per distinct payload, and again after it was replaced. Without a setup `state` is None.

Items, payloads and results are *plain data*: None, bool, int, float, str, bytes, lists, tuples, dicts, sets, and frozen dataclasses and
enums defined in svod. Nothing else is encoded or decoded, so that no code travels, nothing of the user's `__main__` is needed
on the other side, and a worker whose memory a wrong kernel has overwritten can at worst send a refused message. UOps travel through
`ast_to_data`.
"""
from __future__ import annotations

import dataclasses
import importlib
import importlib.util
import io
import pickle
import platform
from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum
from pathlib import Path
from typing import Any, Literal

from svod.core.ir.dtype import to_dtype  # how a DType is restored, the one function a message may name
from svod.core.ir.serialize import ast_to_data, data_to_ast
from svod.errors import FormatError, TuneError
from svod.system.source import source_digest

__all__ = ["Outcome", "Status", "WorkerConfig", "ast_to_data", "data_to_ast", "decode", "encode", "identity", "mismatch", "resolve_job"]

MAX_MESSAGE = 256 << 20    # bytes of one encoded item or result
WORK_MODULE = "svod.tune.measure.work"

Status = Literal["ok", "error", "crash", "timeout", "lost"]


@dataclass(frozen=True, slots=True)
class Outcome:
    """What became of one item. Always a record, whatever the candidate did.

    status     value                              kind                                      message
    ok         what the job returned              ""                                        ""
    error      None                               class of the exception                    its text
    crash      None                               signal ("SIGSEGV") or "exit 3"            end of the worker's stderr
    timeout    None                               "deadline" or "step" (see `step_limit`)   what was exceeded
    lost       None                               "worker" or "closed"                      why no worker could finish it
    """

    status: Status
    value: Any = None
    kind: str = ""
    message: str = ""
    seconds: float = 0.0    # wall time from the start of the item on a ready worker; waiting and set-up not included
    worker: str = ""        # which worker, e.g. "local-compile-0" or "node1/bench-0"
    attempts: int = 1       # 1 + how often it was given to another worker because of the infrastructure

    @property
    def ok(self) -> bool:
        return self.status == "ok"

    def describe(self) -> str:
        """One line for a log or a database column: `crash SIGSEGV`, `error CompileError: …`, `timeout after 2.0 s`."""
        if self.status == "timeout":
            return f"timeout after {self.seconds:.3g} s"
        first = self.message.strip().partition("\n")[0][:300]
        return " ".join(p for p in (self.status, f"{self.kind}: {first}" if first and self.kind else self.kind or first) if p)


@dataclass(frozen=True)
class WorkerConfig:
    """How child processes are made; the same for local and Ray workers.

    `preload` lists what the fork server imports once; `module:function` is imported and called (to warm up).
    `memory_bytes` limits a child's writable memory (0: half of what the machine or container has).
    `start` is "fork" (10 ms a child) or "spawn" (0.3 s a child, for systems without fork)."""

    preload: tuple[str, ...] = ("numpy", "llvmlite.binding", WORK_MODULE)
    job_modules: tuple[str, ...] = ()
    paths: tuple[str, ...] = ()             # put on the children's sys.path, after svod's own
    memory_bytes: int = 0
    setup_deadline: float = 30.0            # seconds for one setup
    niceness: int = 0                       # added to the children's nice value
    start: Literal["fork", "spawn"] = "fork"


def resolve_job(name: str, job_modules: tuple[str, ...] = ()) -> tuple[Callable[[Any, Any], Any], Callable[[Any], Any] | None]:
    """The function of a job and its setup, or None. Raises TuneError for a name outside the registry."""
    module_name, _, function = name.partition(":")
    if module_name not in (WORK_MODULE, *job_modules):
        raise TuneError(f"asked for the job {name!r}; jobs are functions of {', '.join((WORK_MODULE, *job_modules))}")
    module = importlib.import_module(module_name)
    run = getattr(module, function, None)
    if not callable(run):
        raise TuneError(f"asked for the job {name!r}; {module_name} has no function {function!r}")
    return run, getattr(module, f"{function}_setup", None)


# -- plain data ------------------------------------------------------------------------------------
def _is_plain_class(cls: type) -> bool:
    return (cls.__module__ == "svod" or cls.__module__.startswith("svod.")) and (dataclasses.is_dataclass(cls) or issubclass(cls, Enum))


class _Encoder(pickle.Pickler):
    def reducer_override(self, obj: Any) -> Any:
        # called for everything but the exact built-in data types
        if obj is to_dtype or _is_plain_class(obj if isinstance(obj, type) else type(obj)):
            return NotImplemented
        what = f"{type(obj).__module__}.{type(obj).__qualname__}"
        raise FormatError(f"{obj!r:.200} of type {what} is not plain data; use numbers, text, bytes, lists, dicts or dataclasses of svod "
                          "(a UOp travels as ast_to_data(uop))")


class _Decoder(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        if module == "svod" or module.startswith("svod."):
            value = super().find_class(module, name)
            if value is to_dtype or (isinstance(value, type) and _is_plain_class(value)):
                return value
        raise FormatError(f"a message names {module}.{name}, which is not plain data")


def encode(value: Any) -> bytes:
    """`value` as bytes. Raises FormatError when it is not plain data, nested too deep, or above MAX_MESSAGE bytes."""
    out = io.BytesIO()
    try:
        _Encoder(out, protocol=5).dump(value)
    except FormatError:
        raise
    except (RecursionError, pickle.PicklingError, TypeError, AttributeError, ValueError) as e:
        raise FormatError(f"not plain data: {type(e).__name__}: {e}") from e
    if out.tell() > MAX_MESSAGE:
        raise FormatError(f"{out.tell()} bytes in one message; the limit is {MAX_MESSAGE}")
    return out.getvalue()


def decode(data: bytes | bytearray | memoryview) -> Any:
    """The inverse of `encode`. Raises FormatError for anything `encode` would not have written."""
    try:
        return _Decoder(io.BytesIO(data)).load()
    except FormatError:
        raise
    except Exception as e:  # damaged pickle data ends in any exception at all: this is the border where it becomes one error
        raise FormatError(f"a damaged message of {len(data)} bytes: {type(e).__name__}: {e}") from e


# -- who is it -------------------------------------------------------------------------------------
def identity() -> dict[str, str]:
    """What must be equal at both ends for a measurement to mean the same: svod's source, Python, LLVM."""
    import llvmlite
    import llvmlite.binding as llvm
    return {"svod source": source_digest(), "Python": ".".join(platform.python_version_tuple()[:2]),
            "llvmlite": llvmlite.__version__, "LLVM": ".".join(map(str, llvm.llvm_version_info))}


def mismatch(ours: dict[str, str], theirs: dict[str, str]) -> str:
    """"" when both ends agree, else what differs: `LLVM 22.1.0 here, 20.1.8 there`."""
    return "; ".join(f"{k} {v} here, {theirs.get(k, 'unknown')} there" for k, v in ours.items() if theirs.get(k) != v)


def package_roots() -> list[str]:
    """Directories from which this process imports svod, numpy and llvmlite: what a child needs on its sys.path. Nothing of the
    user's script directory is passed on, so that a `queue.py` beside a script cannot replace a module of the standard library."""
    roots: list[str] = []
    for name in ("svod", "numpy", "llvmlite"):
        spec = importlib.util.find_spec(name)
        for location in (spec.submodule_search_locations or ()) if spec else ():
            root = str(Path(location).resolve().parent)
            if root not in roots:
                roots.append(root)
    return roots
