"""The messages between the search and its workers: names of jobs, plain data, outcomes, and the identity of each end.

A *job* is a function named by its import path, such as `"svod.tune.measure.work:compile_candidate"`. Its module is
`svod.tune.measure.work` or one of `WorkerConfig.job_modules`. It is called as `function(item, state)`. A job that keeps data between items
(inputs, a reference result) has a companion `function_setup(payload)`, here `compile_candidate_setup`, whose result is `state`. A worker
calls it once per distinct payload, and again in a new process. Without a setup `state` is None.

Items, payloads and results are *plain data*: None, bool, int, float, str, bytes, lists, tuples, dicts, sets, and dataclasses and enums of
svod. UOps are sent in the form of `ast_to_data`. Nothing else is encoded or decoded: no code is sent, the other side does not need the
user's `__main__`, and the messages of a worker whose memory a wrong kernel has overwritten are refused. A member of an enum is sent as its
class and its name, because releases of Python pickle it in different ways.
"""
from __future__ import annotations

import dataclasses
import importlib
import io
import pickle
import platform
from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum
from typing import Any, Literal

from svod.core.ir.dtype import to_dtype
from svod.errors import FormatError, TuneError
from svod.system.process.system_files import boot_id
from svod.system.source import source_digest

MAX_MESSAGE = 256 << 20    # bytes of one encoded item or result
WORK_MODULE = "svod.tune.measure.work"

Status = Literal["ok", "error", "crash", "timeout", "lost"]


def machine_name() -> str:
    """The host's name and the beginning of its boot id, which differs for two machines with the same name and after a reboot."""
    return f"{platform.node()}-{boot_id()[:8]}"


@dataclass(frozen=True, slots=True)
class Outcome:
    """The result of one item, whatever the candidate did.

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
    seconds: float = 0.0    # wall time from the start of the item on a ready worker, without waiting and setup
    worker: str = ""        # the worker's name, e.g. "local-compile-0"
    attempts: int = 1       # number of workers that ran the item: more than 1 if workers were lost while they ran it
    host: str = ""          # the machine of the worker, by `machine_name`; "": this one

    @property
    def ok(self) -> bool:
        return self.status == "ok"

    def describe(self) -> str:
        """One line for a log or a database column: `crash SIGSEGV`, `error CompileError: …`, `timeout after 2.0 s`."""
        if self.status == "timeout":
            return f"timeout after {self.seconds:.3g} s"
        first = next(iter(self.message.strip().splitlines()), "")[:300]
        return " ".join(p for p in (self.status, f"{self.kind}: {first}" if first and self.kind else self.kind or first) if p)


@dataclass(frozen=True)
class WorkerConfig:
    """Settings for the child processes of local and of Ray workers.

    `preload` lists the modules that the fork server imports once; for an entry `module:function` it also calls the function (to warm up).
    `memory_bytes` limits a child's writable memory (0: half of the memory of the machine or container)."""

    preload: tuple[str, ...] = ("numpy", "llvmlite.binding", "svod.compile.cpu.backend", WORK_MODULE)
    job_modules: tuple[str, ...] = ()
    paths: tuple[str, ...] = ()             # added to the children's sys.path, behind svod's own
    memory_bytes: int = 0
    setup_deadline: float = 30.0            # seconds for one setup


def resolve_job(name: str, job_modules: tuple[str, ...] = ()) -> tuple[Callable[[Any, Any], Any], Callable[[Any], Any] | None]:
    """The function of a job, and its setup function or None. Raises TuneError for a name outside the allowed modules."""
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


def enum_member(cls: type[Enum], name: str) -> Enum:
    """The member of an enum by its name."""
    return cls[name]


def _restores(value: Any) -> bool:
    """Whether `value` is one of the two functions that a message may name, which restore an element type or a member of an enum."""
    return value is to_dtype or value is enum_member


class _Encoder(pickle.Pickler):
    def reducer_override(self, obj: Any) -> Any:
        # pickle calls this for everything but the exact built-in data types
        if _restores(obj) or (isinstance(obj, type) and _is_plain_class(obj)):
            return NotImplemented
        if _is_plain_class(type(obj)):
            return (enum_member, (type(obj), obj.name)) if isinstance(obj, Enum) else NotImplemented
        what = f"{type(obj).__module__}.{type(obj).__qualname__}"
        raise FormatError(f"{obj!r:.200} of type {what} is not plain data; use numbers, text, bytes, lists, dicts or dataclasses of svod "
                          "(a UOp travels as ast_to_data(uop))")


class _Decoder(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        if module == "svod" or module.startswith("svod."):
            value = super().find_class(module, name)
            if _restores(value) or (isinstance(value, type) and _is_plain_class(value)):
                return value
        raise FormatError(f"a message names {module}.{name}, which is not plain data")


def encode(value: Any) -> bytes:
    """Encode `value` as bytes. Raises FormatError for a value that is not plain data, nested too deeply, or above MAX_MESSAGE bytes."""
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
    """The inverse of `encode`. Raises FormatError for anything that `encode` does not write."""
    try:
        return _Decoder(io.BytesIO(data)).load()
    except FormatError:
        raise
    except Exception as e:  # damaged pickle data may raise any exception
        raise FormatError(f"a damaged message of {len(data)} bytes: {type(e).__name__}: {e}") from e


# -- identity --------------------------------------------------------------------------------------
def identity() -> dict[str, str]:
    """The versions that must be equal at both ends for measurements to be comparable: svod's source, Python, LLVM."""
    import llvmlite
    import llvmlite.binding as llvm
    return {"svod source": source_digest(), "Python": ".".join(platform.python_version_tuple()[:2]),
            "llvmlite": llvmlite.__version__, "LLVM": ".".join(map(str, llvm.llvm_version_info))}


def mismatch(ours: dict[str, str], theirs: dict[str, str]) -> str:
    """The differences between the identities of two ends, as in `LLVM 22.1.0 here, 20.1.8 there`; "" when they agree."""
    return "; ".join(f"{k} {v} here, {theirs.get(k, 'unknown')} there" for k, v in ours.items() if theirs.get(k) != v)
