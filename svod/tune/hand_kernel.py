"""A kernel to be optimised by hand: its loop nest, opts one by one, predictions, times, code, and a search.

    k = HandKernel.of(kernel, target)               also returned by `svod.kernel(a @ b)`
    k = k.apply("UPCAST", "o0", 8)                  returns a new object; k itself never changes
    print(k.nest()); print(k.time()); k.check()

Times are taken in a worker process, as a search takes them: a chain whose code is wrong or never ends does no harm to this process.
"""
from __future__ import annotations

import atexit
import dataclasses
import os
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from svod.bench.roofline import Bound, Ceilings, cached_ceilings
from svod.bench.timer import protocol_of
from svod.compile.backend import backend_named, device_named
from svod.compile.plan.kernel_form import KernelForm
from svod.compile.resources import PhaseResources
from svod.config import BeamConfig, BenchConfig, data_dir
from svod.core.cost.cost import Cost
from svod.core.cost.op_count import count_operations
from svod.core.cost.template import made_by
from svod.core.kernel.apply import apply_opt, apply_opts
from svod.core.kernel.chain_text import chain_text, chain_words, parse_chain
from svod.core.kernel.kernel import Kernel
from svod.core.kernel.scheduler import Opt, Scheduler
from svod.core.machine.target import Target
from svod.core.tree.show import print_nest
from svod.errors import TuneError
from svod.steps.notebook import kernel_html
from svod.steps.page import KernelSteps
from svod.steps.plan_steps import part_of_kernel
from svod.system.once import once
from svod.system.process.program import user_at_host
from svod.system.quantities import bytes_rate, flops_rate, percent
from svod.system.quantities import seconds as duration
from svod.tune.db import Measurement, TuningDB, Verdict
from svod.tune.measure.candidate import Candidate, Origin
from svod.tune.measure.measurer import Confirmed, Failure, Screened
from svod.tune.measure.worker_measurer import WorkerMeasurer
from svod.tune.relatives import kernel_record
from svod.tune.search.budget import ModelBudget
from svod.tune.session import KernelTask, TuneSession, bound_at
from svod.tune.workers.executor import Executor
from svod.tune.workers.local_executor import LocalExecutor

BUILD_SECONDS = 60.0
TIME_SECONDS, CONFIRM_SECONDS = 0.3, 1.0


@once
def _worker() -> Executor:
    """The worker process that times kernels, started when it is first needed and ended together with this process."""
    executor = LocalExecutor(1)
    atexit.register(executor.close)
    return executor


@dataclass(frozen=True)
class Timing:
    """Seconds of one run of a kernel, its floating-point operations, and the bytes of its operands. `bound`: the least time that the
    machine's ceilings allow; None where they are not known."""

    seconds: float
    flops: float
    bytes: float
    bound: Bound | None

    def __float__(self) -> float:
        return self.seconds

    @property
    def flops_per_second(self) -> float:
        return self.flops / self.seconds

    @property
    def bytes_per_second(self) -> float:
        return self.bytes / self.seconds

    @property
    def ceiling_share(self) -> float | None:
        """The share of the machine's ceiling that the kernel reaches, bound / seconds; None where the ceiling is not known."""
        return None if self.bound is None else self.bound.seconds / self.seconds

    def __str__(self) -> str:
        share = f", {percent(self.ceiling_share)} of the {self.bound.by} ceiling" if self.bound is not None else ""
        return f"{duration(self.seconds)}, {flops_rate(self.flops_per_second)}, {bytes_rate(self.bytes_per_second)}{share}"


@dataclass(frozen=True)
class Check:
    """Whether a kernel's outputs are right. `how`: what was compared; `reason`: what differed."""

    right: bool
    how: str
    reason: str = ""

    def __bool__(self) -> bool:
        return self.right

    def __str__(self) -> str:
        return f"right: {self.how}" if self.right else f"wrong: {self.reason} ({self.how})"


class HandKernel:
    """A kernel under a chain of opts. Methods that change the chain return a new HandKernel.

    `kernel` is the kernel without any opt. `state.kernel` differs from it after ONLINE, an opt that rewrites the AST."""

    def __init__(self, kernel: Kernel, state: Scheduler, name: str, db: TuningDB) -> None:
        self.kernel, self.state, self.name, self._db = kernel, state, name, db

    @classmethod
    def of(cls, kernel: Kernel, target: Target, name: str, db: TuningDB) -> HandKernel:
        """The kernel without any opt."""
        return cls(kernel, Scheduler(kernel, target), name, db)

    def _with(self, state: Scheduler) -> HandKernel:
        return HandKernel(self.kernel, state, self.name, self._db)

    # -- identity -----------------------------------------------------------------------------------
    @property
    def key(self) -> str:
        """The kernel's key in the tuning database."""
        return self.kernel.key

    @property
    def opts(self) -> tuple[Opt, ...]:
        """The opts of the chain in order, each as (op, axis or stage, argument)."""
        return self.state.applied_opts

    @property
    def chain(self) -> str:
        """The chain as text, in the form that `apply` and PrepareConfig.opts take."""
        return chain_text(self.opts)

    def __repr__(self) -> str:
        kernel = self.state.kernel
        axes = " × ".join(f"{a.name} {a.extent}" for a in kernel.axes if a.stage == kernel.output)
        return f"<kernel {self.name} {self.key[:12]}: {axes}; {chain_words(self.opts)}>"

    def nest(self) -> str:
        """The loop nest that the chain makes, as text."""
        return print_nest(self.state)

    @property
    def template(self) -> str:
        """The template that made the chain, with its amounts, such as "CONTRACTION: lanes 32, rows 12"; "" for a chain made by hand or by a
        search."""
        return made_by(self.state)

    def cost(self) -> Cost:
        """The predicted cost of one run. Printed, it shows the cycles of each stage (on a GPU of each phase) and of each resource."""
        return backend_named(self.state.target.device).cost(self.state)

    # -- other chains -------------------------------------------------------------------------------
    def apply(self, op: str, axis: str | None = None, arg: Any = None) -> HandKernel:
        """The kernel with one more opt, `apply("UPCAST", "o0", 8)`, or several as text, `apply("UPCAST(o0, 8) THREAD(o1, 2)")`.

        Raises KernelOptError, which says why, for an opt that does not apply."""
        if axis is None:
            return self._with(apply_opts(self.state, parse_chain(op)))
        return self._with(apply_opt(self.state, Opt(op, axis, arg)))

    def untouched(self) -> HandKernel:
        """The kernel without any opt."""
        return self._with(Scheduler(self.kernel, self.state.target))

    def undo(self, opts: int = 1) -> HandKernel:
        """The kernel without the last `opts` opts of its chain."""
        kept = self.opts[:max(0, len(self.opts) - opts)]
        return self._with(apply_opts(self.untouched().state, kept))

    def heuristic(self) -> HandKernel:
        """The kernel under the heuristic's chain, which svod uses when neither lock file nor database has one."""
        return self._with(backend_named(self.state.target.device).heuristic(self.untouched().state))

    def sketches(self) -> list[HandKernel]:
        """The kernel under each of the chains that a search starts from, the fastest by prediction first."""
        backend = backend_named(self.state.target.device)
        return [self._with(s) for s in sorted(backend.sketches(self.untouched().state), key=lambda s: backend.cost(s).cycles)]

    def search(self, beam: int = 4, budget: float = 60.0) -> HandKernel:
        """Search for `budget` seconds with a beam of width `beam`, and return the kernel under the best chain. The results are stored in
        the database. Raises TuneError where no worker can be started."""
        result = self._session(BeamConfig(width=beam, budget=budget), budget)
        finding = result.findings.get(self.key)
        if finding is None:
            raise TuneError(f"kernel {self.name} was not searched: another process is searching it")
        return self._with(apply_opts(self.untouched().state, finding.chain))

    def _session(self, config: BeamConfig, budget: float) -> Any:
        backend_named(self.state.target.device).check_runs()
        with LocalExecutor(None) as executor:
            return TuneSession([KernelTask(self.kernel, name=self.name)], self.state.target, executor=executor, db=self._db,
                               config=config, budget=ModelBudget(budget), ceilings=self._ceilings).run()

    # -- numbers and times --------------------------------------------------------------------------
    def time(self) -> Timing:
        """Time the kernel in a worker process: the median of at least `BenchConfig.rounds` runs of its final code, with operands
        that may be in the caches. Raises TuneError for a kernel that cannot be timed."""
        measurer, (mine,) = self._built(self)
        screened = measurer.screen([mine], None)[0]
        confirmed: Confirmed | Failure | None = None
        if isinstance(screened, Screened):
            mine.seconds = screened.seconds
            confirmed = measurer.confirm([mine], TIME_SECONDS)[0]
        if not isinstance(confirmed, Confirmed):
            failure = screened if isinstance(screened, Failure) else confirmed
            raise TuneError(f"kernel {self.name} cannot be timed: {failure.reason if isinstance(failure, Failure) else ''}")
        return self._timing(confirmed.seconds, measurer)

    def _timing(self, seconds: float, measurer: WorkerMeasurer) -> Timing:
        kernel = self.kernel
        return Timing(seconds, float(count_operations(kernel.ast).flops), float(kernel.nbytes),
                      bound_at(kernel, measurer.sizes, self.state.target, self._ceilings()))

    def check(self) -> Check:
        """Run the kernel in a worker process and compare its outputs with the reference's."""
        measurer, (mine,) = self._built(self)
        verification = measurer.verify([mine])[0]
        return Check(bool(verification.right), verification.how, verification.reason)

    def save(self) -> Timing:
        """Verify the kernel, time it against the heuristic's chain, and store the results in the tuning database: `prepare` uses the chain
        if it is the fastest there. Returns its time. Raises TuneError for a kernel that is wrong or cannot be timed."""
        measurer, (heuristic, mine) = self._built(self.heuristic(), self)
        for c in (heuristic, mine):
            screened = measurer.screen([c], None)[0]
            verification = measurer.verify([c])[0]
            if isinstance(screened, Failure) or not verification.right:
                why = screened.reason if isinstance(screened, Failure) else verification.reason
                raise TuneError(f"kernel {self.name} under {chain_words(c.chain)} is not saved: {why}")
            c.seconds, c.known["how"] = screened.seconds, verification.how
        confirmed = measurer.confirm([heuristic, mine], CONFIRM_SECONDS)
        failed = next((c for c in confirmed if isinstance(c, Failure)), None)
        if failed is not None:
            raise TuneError(f"kernel {self.name} is not saved: {failed.reason}")
        self._record(list(zip((heuristic, mine), confirmed, strict=True)))      # type: ignore[arg-type]
        found = confirmed[1]
        assert isinstance(found, Confirmed)
        return self._timing(found.seconds, measurer)

    def _built(self, *kernels: HandKernel) -> tuple[WorkerMeasurer, list[Candidate]]:
        """A measurer of the kernel, and a candidate for each of `kernels`, compiled to final code. Raises DeviceError if none can run."""
        backend_named(self.state.target.device).check_runs()
        measurer = WorkerMeasurer(self.kernel, self.state.target, _worker(), BeamConfig(), BenchConfig.from_env(), shrink=False)
        candidates = [Candidate(k.state, k.opts, Origin.ACTION) for k in kernels]
        answers = dict(measurer.lower(candidates, 0))
        lowered = [answers[c] for c in candidates]
        built = measurer.build(candidates, final=True, deadline=BUILD_SECONDS)
        for c, low, code in zip(candidates, lowered, built, strict=True):
            if isinstance(low, Failure) or isinstance(code, Failure):
                reason = low.reason if isinstance(low, Failure) else code.reason       # type: ignore[union-attr]
                raise TuneError(f"kernel {self.name} under {chain_words(c.chain)} cannot be compiled: {reason}")
            c.linear, c.size, c.built = low.digest, low.size, code
        return measurer, candidates

    def _record(self, timed: list[tuple[Candidate, Confirmed]]) -> None:
        """Store confirmed times and verdicts. `timed`: the heuristic's candidate, then the candidate of this kernel's chain."""
        db, target, kernel = self._db, self.state.target, self.kernel
        pair = device_named(target.device).pair
        against = timed[0][1]
        db.record([kernel_record(kernel, self.name)])
        search = db.begin_search(self.key, target.key, strategy="hand", executor=_worker().description,
                                 config=dataclasses.asdict(BeamConfig(width=0)))
        records: list[Any] = []
        for c, t in timed:
            sizes = [{"at": dict(zip(kernel.variables, at, strict=True)), "seconds": s, "ratio": r} for at, s, r in t.sizes]
            host = {"load": round(os.getloadavg()[0], 2), "executor": _worker().description, **({"sizes": sizes} if sizes else {})}
            records.append(Measurement(
                kernel=self.key, target=target.key, chain=tuple(tuple(o.to_json()) for o in c.chain), linear=c.linear, status="ok",
                codegen=pair.revision, compiler=pair.key, protocol=protocol_of(target), step="confirm", time=t.seconds, samples=t.samples,
                anchor=against.seconds, baseline=against.seconds, baseline_linear=timed[0][0].linear, ratio=t.ratio, ratio_low=t.low,
                ratio_high=t.high, search=search, host=host, taken_at=time.time()))
            records.append(Verdict(self.key, target.key, c.linear, "verified", pair.revision, compiler=pair.key, by=user_at_host(),
                                   method=c.known["how"], search=search, taken_at=time.time()))
        db.record(records)
        db.end_search(search, "saved by hand", {"best": timed[1][1].seconds, "heuristic": against.seconds, "confirmed": True})

    def _ceilings(self) -> Ceilings | None:
        if backend_named(self.state.target.device).ceilings is None:
            return None
        return cached_ceilings(Path(data_dir()) / "ceilings.json", self.state.target, self.state.target.threads, quick=True)

    # -- code -----------------------------------------------------------------------------------------
    @property
    def _form(self) -> KernelForm:
        return KernelForm(self.kernel, self.state.target, self.opts, self.state.target.device)

    def linear(self) -> str:
        """LINEAR as text: svod's instructions, from which the machine code is generated."""
        return self._form.linear()

    def llvm(self, optimized: bool = False) -> str:
        """The LLVM IR that svod generates, or with `optimized` the IR after LLVM's passes. Raises UnsupportedError for a device whose code
        is not made by LLVM, or with `optimized` without these passes."""
        return self._form.llvm(optimized)

    def asm(self) -> str:
        """The assembly of the code that runs. Raises UnsupportedError for the same devices as `llvm`."""
        return self._form.asm()

    def sass(self) -> str:
        """The machine code of an NVIDIA GPU. Raises UnsupportedError for other devices, and where no tool prints it."""
        return self._form.sass()

    def resources(self) -> tuple[PhaseResources, ...]:
        """The resources of each phase on a device with groups of threads: threads, shared memory, and, where the compiler reports them,
        registers, spills and occupancy; () for other devices."""
        return self._form.resources()

    def steps(self) -> KernelSteps:
        """The forms of the kernel from its AST over each opt to machine code, with changes marked. They are shown as text when printed and
        as a page in a notebook; `steps().save("steps.html")` writes the page to a file. A step that fails shows its error instead."""
        return KernelSteps(part_of_kernel(self._form, self.name))

    def _repr_html_(self) -> str:
        facts = [("key", self.key[:16]), ("target", self.state.target.key), ("chain", chain_words(self.opts))]
        return kernel_html(repr(self), facts, self.nest)

    def object(self, path: str | os.PathLike[str]) -> Path:
        """Write the object file of the kernel, which `objdump -d` reads, and return its path. Raises FileError."""
        return self._form.object(path)
