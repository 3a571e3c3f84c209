"""Compilation of a kernel under a chain of opts: once per process, and once per object cache.

Code is looked up by (kernel key, chain, target, code generator): a second start of the program lowers and compiles nothing. Compilers such
as LLVM run in other threads than the one that prepares a plan: while that thread chooses the chain of a kernel and lowers it, they compile
the kernels before it.

    with Compilation(compiler) as compilation:
        compilation.begin(a, choice)                lowered here; LLVM compiles it in another thread
        compilation.begin(b, choice)
        compile_all({…}, …)                         waits for LLVM, and loads the code
"""
from __future__ import annotations

import hashlib
import json
import logging
import sys
import threading
from collections import OrderedDict
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import CancelledError, Future, ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from typing import Any, TypeVar

from svod.compile.backend import Device, device_named
from svod.compile.lower.program import PackedTemporaries, Program, ProgramSpec
from svod.compile.plan.kernel_form import KernelForm
from svod.compile.plan.object_cache import Build, CachedObject, ObjectCache, ObjectKey
from svod.compile.plan.plan_parts import LoadedCode
from svod.compile.plan.stages import add_stage, build, lower_kernel, make_program, rendered, spec_of, stage_of
from svod.config import PrepareConfig, default_threads, object_cache_dirs
from svod.core.cost.template import made_by
from svod.core.ir.uop import Ops, UOp
from svod.core.kernel.apply import apply_opts
from svod.core.kernel.chain_text import chain_of
from svod.core.kernel.kernel import Kernel
from svod.core.kernel.scheduler import Opt, Scheduler
from svod.core.machine.target import HOST, Target
from svod.errors import CompileError, KernelOptError
from svod.system.forksafe import remake_after_fork
from svod.system.process.cores import usable_cores

log = logging.getLogger("svod.tune.chains")

Chain = tuple[Opt, ...]
T = TypeVar("T")
Submit = Callable[[Callable[[], bytes]], Future[bytes] | None]      # lets another thread do some work, if it can

NO_PROGRAM = ProgramSpec("", (), (), (), ())       # the spec of a cache entry without code, which has only remarks
FLIGHTS = 64   # number of locks of compilations, chosen by the hash of a key: threads rarely wait for another key


@dataclass(frozen=True)
class Choice:
    """The chain of opts that a kernel runs with, its source (database, lock, transfer, beam, heuristic, explicit, none, pending, library),
    and the reason for the choice. `template`: the template and amounts that the heuristic made the chain from. `unchecked`: chains that
    were measured on other machines and rank before this one, but have to be measured here before they are used. `own`: chooses the kernel's
    own form, if this is a first form, which is found and compiled sooner and runs until the own form is there (`svod.tune.first_forms`)."""

    chain: Chain
    source: str
    why: str
    template: str = ""
    unchecked: tuple[Chain, ...] = ()
    own: Callable[[], Choice] | None = field(default=None, compare=False)

    @property
    def told(self) -> str:
        """The reason; for the heuristic's chain also the template."""
        return "; ".join(text for text in (self.why, self.template if self.source == "heuristic" else "") if text)


@dataclass(frozen=True)
class Heuristic:
    """The heuristic's chain for a kernel, and the template and amounts that it was made from ("": no template)."""

    chain: Chain
    template: str


@dataclass(frozen=True)
class Compiled:
    """A kernel's code, ready to run. `own`: compiles the kernel's own form, if this is a first form."""

    spec: ProgramSpec
    loaded: LoadedCode
    linear: str               # digest of LINEAR
    chain: Chain
    source: str
    why: str
    packing: PackedTemporaries | None = None    # the output of the phases that run once
    form: KernelForm | None = None      # the kernel, its chain and the target
    own: Callable[[], Compiled] | None = field(default=None, compare=False)


@dataclass(frozen=True)
class _Begun:
    """A lowered kernel whose compilation has begun: its PROGRAM with the SOURCE, and the binary that another thread compiles."""

    lowered: Program
    program: UOp
    binary: Future[bytes]


def _make_flights() -> tuple[threading.Lock, ...]:
    return tuple(threading.Lock() for _ in range(FLIGHTS))


class Compiler:
    """Compiles a kernel under a chain, once per process (concurrent requests wait for the first) and once per object cache. The last
    `limit` results stay in memory."""

    def __init__(self, target: Target, cache: ObjectCache, limit: int, device: Device | None = None):
        self.target, self.cache, self.limit = target, cache, limit
        self.backend, self.pair = device or device_named(target.device)
        self.device = f"{target.device}:{self.pair.name}"
        self._made: OrderedDict[ObjectKey, Compiled] = OrderedDict()
        self._heuristics: OrderedDict[ObjectKey, Heuristic] = OrderedDict()
        self._lock = threading.Lock()
        self._flights = _make_flights()
        self._begun: dict[ObjectKey, _Begun] = {}
        remake_after_fork(self, "_begun", dict)     # the threads of the parent do not exist in the child
        remake_after_fork(self, "_lock", threading.Lock)
        remake_after_fork(self, "_flights", _make_flights)

    @cached_property
    def build(self) -> Build:
        """The build that this compiler's objects belong to."""
        return Build(self.target.key, self.pair.revision, self.pair.key)

    def _key(self, kernel: Kernel, what: str) -> ObjectKey:
        return ObjectKey(kernel.key, what, self.build)

    def _key_of(self, kernel: Kernel, choice: Choice) -> ObjectKey:
        return self._key(kernel, chain_digest(choice.chain) if choice.own is None else "first")

    def has(self, kernel: Kernel, choice: Choice) -> bool:
        """Whether the kernel was compiled under a chain, in this process or as the object cache has it."""
        key = self._key_of(kernel, choice)
        return key in self._made or self.cache.has(key)

    def first_chain(self, kernel: Kernel) -> tuple[Chain, str] | None:
        """Return the chain of the first form that was compiled for a kernel, in this process or as the object cache has it, and the digest
        of its LINEAR."""
        key = self._key(kernel, "first")
        made = self._made.get(key)
        if made is not None:
            return made.chain, made.linear
        with suppress(KeyError, KernelOptError):
            remarks = self.cache.remarks(key)
            return chain_of(remarks["chain"]), remarks["linear"]
        return None

    def _remembered(self, known: OrderedDict[ObjectKey, T], key: ObjectKey, make: Callable[[], T]) -> T:
        """Return the value of a key, which `make` computes once; `known` keeps the latest ones. Code that is dropped here stays alive in
        the plans that use it."""
        with self._lock:
            value = known.get(key)
        if value is None:
            value = make()
            with self._lock:
                known[key] = value
                while len(known) > self.limit:
                    known.popitem(last=False)
        return value

    def compile(self, kernel: Kernel, choice: Choice) -> Compiled:
        """Compile a kernel under a chain. Raises KernelOptError for a chain that does not apply, and CompileError if lowering or the
        compiler fails."""
        key, own = self._key_of(kernel, choice), choice.own
        with self._flights[hash(key) % FLIGHTS]:
            compiled = self._remembered(self._made, key, lambda: self._compile(kernel, choice, key))
        return replace(compiled, source=choice.source if own is None else "first", why=choice.told,
                       form=KernelForm(kernel, self.target, compiled.chain, self.device),
                       own=None if own is None else lambda: self.compile(kernel, own()))

    def _compile(self, kernel: Kernel, choice: Choice, key: ObjectKey) -> Compiled:
        entry, remarks = self.cache.get(key), {"chain": _to_json(choice.chain)} if choice.own is not None else {}
        if entry is None or "linear" not in entry.remarks or not remarks.items() <= entry.remarks.items():
            lowered, program = self._built(kernel, choice, key)
            entry = CachedObject(spec_of(program, self.target), stage_of(program, Ops.BINARY).arg,
                                 {"linear": lowered.digest, "packing": lowered.packing, **remarks})
            self.cache.put(key, entry)
        loaded = self.pair.load(entry.code, entry.spec)
        packing = entry.remarks.get("packing")
        return Compiled(entry.spec, loaded, entry.remarks["linear"], choice.chain, choice.source, choice.why,
                        packing=PackedTemporaries(tuple(packing[0]), tuple(packing[1]), packing[2]) if packing else None)

    def _built(self, kernel: Kernel, choice: Choice, key: ObjectKey) -> tuple[Program, UOp]:
        """Return the lowered kernel, and the PROGRAM with all stages."""
        begun = self._begun.pop(key, None)
        if begun is not None:
            # The thread that began the compilation cancels it if its own preparation ends before.
            with suppress(CancelledError):
                return begun.lowered, build(add_stage(begun.program, Ops.BINARY, begun.binary.result()), self.target)
        lowered = self._lowered(kernel, choice)
        program = rendered(self._program(kernel, lowered), self.target)
        return lowered, build(add_stage(program, Ops.BINARY, self._binary(program, choice)), self.target)

    def _lowered(self, kernel: Kernel, choice: Choice) -> Program:
        return lower_kernel(kernel, self.target, choice.chain)

    def _binary(self, program: UOp, choice: Choice) -> bytes:
        return self.pair.compile(stage_of(program, Ops.SOURCE).arg, self.target, optimize=choice.own is None)

    def _program(self, kernel: Kernel, lowered: Program) -> UOp:
        return add_stage(make_program(kernel.ast, self.device), Ops.LINEAR, lowered)

    def begin(self, kernel: Kernel, choice: Choice, submit: Submit) -> ObjectKey | None:
        """Lower a kernel, and let another thread compile it by `submit`, unless it was compiled already or its compilation has begun.
        Returns the key of the compilation, or None if none begins. An error is not raised here: `compile` raises it, because it does the
        same work again."""
        key = self._key_of(kernel, choice)
        with self._lock:
            if key in self._made or key in self._begun:
                return None
        if self.cache.has(key):
            return None
        with suppress(KernelOptError, CompileError):
            lowered = self._lowered(kernel, choice)
            program = rendered(self._program(kernel, lowered), self.target)
            binary = submit(partial(self._binary, program, choice))
            if binary is not None:
                self._begun[key] = _Begun(lowered, program, binary)
                return key
        return None

    def forget(self, key: ObjectKey) -> None:
        """Drop a compilation that has begun and whose result `compile` has not used."""
        self._begun.pop(key, None)

    def heuristic(self, kernel: Kernel) -> Chain:
        """Return the heuristic's chain."""
        return self._heuristic_of(kernel).chain

    def heuristic_choice(self, kernel: Kernel, why: str = "") -> Choice:
        """Return the choice of the heuristic's chain for the reason `why`."""
        best = self._heuristic_of(kernel)
        return Choice(best.chain, "heuristic", why, best.template)

    def _heuristic_of(self, kernel: Kernel) -> Heuristic:
        """Return the heuristic's chain and template, cached in memory and in the object cache: computing them takes longer than loading
        them."""
        if kernel.library_kernel is not None:
            return Heuristic((), "")
        key = self._key(kernel, "heuristic")
        return self._remembered(self._heuristics, key, lambda: self._find_heuristic(kernel, key))

    def knows_heuristic(self, kernel: Kernel) -> bool:
        """Whether the heuristic's chain is in memory or in the object cache."""
        key = self._key(kernel, "heuristic")
        return kernel.library_kernel is not None or key in self._heuristics or self.cache.has(key)

    def _find_heuristic(self, kernel: Kernel, key: ObjectKey) -> Heuristic:
        remarks = self.cache.remarks(key)
        if remarks:
            try:
                return Heuristic(chain_of(remarks["chain"]), str(remarks["template"]))
            except (KeyError, KernelOptError):
                log.info("the remembered heuristic of %s cannot be read and is found anew", kernel.key[:12])
        state = self.backend.heuristic(Scheduler(kernel, self.target))
        best = Heuristic(state.applied_opts, made_by(state))
        self.cache.put(key, CachedObject(NO_PROGRAM, b"", {"chain": _to_json(best.chain), "template": best.template}))
        return best

    def lacks(self, name: str) -> bool:
        """Whether there is an object cache without data under a name."""
        return bool(self.cache.directories) and not self.cache.has(self._data_key(name))

    def kept(self, name: str) -> Any:
        """Return the data that `keep` has stored in the object cache under a name, also in another process and for another target, or
        None."""
        return self.cache.remarks(self._data_key(name)).get("data")

    def keep(self, name: str, data: Any) -> None:
        """Store JSON-able data, which depends on its name and svod's code alone, in the object cache."""
        self.cache.put(self._data_key(name), CachedObject(NO_PROGRAM, b"", {"data": data}))

    def _data_key(self, name: str) -> ObjectKey:
        return ObjectKey(name, "data", self.build.anywhere)

    def predicted_times(self, kernel: Kernel, chain: Chain) -> float:
        """Return the predicted time of a chain as a multiple of the heuristic's, from the object cache if it is there. Raises
        KernelOptError for a chain that does not apply."""
        key = self._key(kernel, f"times {chain_digest(chain)}")
        times = self.cache.remarks(key).get("times")
        if not isinstance(times, float):
            own, heuristic = (self.backend.cost(apply_opts(Scheduler(kernel, self.target), c)).cycles
                              for c in (chain, self.heuristic(kernel)))
            times = float(own / heuristic)
            self.cache.put(key, CachedObject(NO_PROGRAM, b"", {"times": times}))
        return times

    def linear_of(self, kernel: Kernel, chain: Chain) -> str:
        """Return the digest of LINEAR under a chain, from the object cache if it is there."""
        linear = self.cache.remarks(self._key(kernel, chain_digest(chain))).get("linear")
        if isinstance(linear, str):
            return linear
        return lower_kernel(kernel, self.target, chain).digest


def _to_json(chain: Iterable[Opt]) -> list[list[Any]]:
    return [o.to_json() for o in chain]


def chain_digest(chain: Iterable[Opt]) -> str:
    text = json.dumps(_to_json(chain), separators=(",", ":"))
    return hashlib.blake2b(text.encode(), digest_size=16).hexdigest()


_compilers: dict[tuple[Any, ...], Compiler] = {}
_compilers_lock = threading.Lock()
remake_after_fork(sys.modules[__name__], "_compilers_lock", threading.Lock)


def compiler_for(target: Target, config: PrepareConfig) -> Compiler:
    """Return the process's Compiler for a target and an object cache, with the configured device's compiler pair if that device belongs to
    the target. Raises UnsupportedError for a device that is not available."""
    directories = object_cache_dirs(config.object_cache)
    device = device_named(config.device or target.device)
    if device.backend.name != target.device:        # the case of tools that read the records of several targets
        device = device_named(target.device)
    key = (target, directories, config.opt_cache_max, device.pair.name)
    with _compilers_lock:
        compiler = _compilers.get(key)
        if compiler is None:
            cache = ObjectCache(*directories, named=config.object_cache is not None)
            compiler = _compilers[key] = Compiler(target, cache, config.opt_cache_max, device)
    return compiler


class Compilation:
    """The threads in which the kernels of a plan, and the code that runs it, are compiled: one for each core that the compiler's target may
    use, none on a single core. They end with the context, also after an exception; compilations that have begun and were not used are
    dropped."""

    def __init__(self, compiler: Compiler) -> None:
        self.compiler, self._keys = compiler, list[ObjectKey]()
        limit = compiler.target.threads if compiler.target.device == HOST else default_threads()
        cores = usable_cores() if limit is None else min(usable_cores(), limit)
        self._threads = ThreadPoolExecutor(cores, "svod-compile") if cores > 1 else None    # starts threads only for work
        self._started: Future[object] | None = None

    def start(self) -> None:
        """Prepare the process for plans, and load the code that queues need."""
        load = self.compiler.backend.start(self.compiler.cache)
        if load is not None:
            self._started = self._submit(load)      # None: queues load the code when they need it

    def _submit(self, work: Callable[[], T]) -> Future[T] | None:
        """Let another thread do some work. None on a single core, and where no thread can be started."""
        if self._threads is not None:
            with suppress(RuntimeError):
                return self._threads.submit(work)
        return None

    def begin(self, kernel: Kernel, choice: Choice) -> None:
        """Compile a kernel in another thread, ahead of `Compiler.compile`."""
        key = self.compiler.begin(kernel, choice, self._submit) if self._threads is not None else None
        if key is not None:
            self._keys.append(key)

    def __enter__(self) -> Compilation:
        return self

    def __exit__(self, kind: type[BaseException] | None, *exc: object) -> None:
        for key in self._keys:
            self.compiler.forget(key)
        if self._threads is not None:
            self._threads.shutdown(cancel_futures=True)
        if self._started is not None and kind is None and not self._started.cancelled():
            self._started.result()


def compile_all(kernels: Mapping[str, Kernel], choices: Mapping[str, Choice], compiler: Compiler) -> dict[str, Compiled]:
    """Compile every kernel. If a chain from the database or a search fails to compile, use the heuristic's chain and log a warning."""
    out = {}
    with Compilation(compiler) as compilation:
        for key, kernel in kernels.items():
            compilation.begin(kernel, choices[key])
        for key, kernel in kernels.items():
            choice = choices[key]
            try:
                out[key] = compiler.compile(kernel, choice)
            except (KernelOptError, CompileError) as e:
                if choice.own is not None:
                    log.info("kernel %s has no first form (%s)", key[:12], e)
                    out[key] = compiler.compile(kernel, choice.own())
                    continue
                if choice.source in ("explicit", "none", "heuristic"):
                    raise
                log.warning("kernel %s: the chain from the %s cannot be used (%s); using the heuristic", key[:12], choice.source, e)
                out[key] = compiler.compile(kernel, compiler.heuristic_choice(kernel, f"the {choice.source}'s chain failed: {e}"))
    return out
