"""Captures: files with the plans that a process prepared, which can be tuned and timed without the model, its data or its script.

With SVOD_CAPTURE=DIRECTORY (PrepareConfig.capture) every `prepare` calls `announce` before it compiles its kernels, and `append` when it
has a plan. Both add lines of JSON to this process's file in that directory. `read_capture` reads a file, or a directory with the files of
several processes; `write_capture` writes all of it to one file.

    {"format": "svod-capture", "version": 4, "svod": …, "python": …, "command": […]}       first line of every file
    {"kernel": key, "target": …, "name": …, "structure": family, "ast": …}                 once per kernel, before the plans with it
    {"plan": digest, "target": …, "calls": [[kernel, [buffer, …], name, origin, why, level, [offset, …],
                                              [[variable, min, max, [hint, …], bucket or null], …]], …],
     "buffers": [[dtype, elements, kind], …], "outputs": [buffer, …], "seconds": {kernel: seconds of one call}}
    {"form": key, "of": digest, "target": …, "described": …, "lengths": [n, …], "is_transformed": …, "why": …, "is_open": …,
     "other": {"plan": digest, …} or null}                             a convolution of a plan, and that plan with its other form
    {"graph": …, "of": digest, "constants": [position of a BUFFER, …]}     the graph of a plan, if it has alternatives
    {"runs": digest, "count": n}                                       how often the plan was run so far; the last line of a file counts

A capture is data: JSON, never a pickle. Its fields are checked, its kernels rebuilt through `svod.core.ir.serialize`, and their keys
recomputed. An invalid line is skipped and reported in `Capture.problems`; the half line of a process that was killed is ignored. The line
of a kernel that only the other form of a convolution has says so: `"only_in_form": true`.

A captured script can be ended early: `request_stop(directory)` leaves a file there, and the next `prepare` of each process raises
StopCapture (`check_stop`).
"""
from __future__ import annotations

import atexit
import contextlib
import hashlib
import json
import logging
import math
import os
import sys
import threading
import time
import uuid
import weakref
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from importlib import metadata
from itertools import pairwise
from pathlib import Path
from sys import float_info
from types import TracebackType
from typing import Annotated, Any, NamedTuple, Protocol

from msgspec import Meta

from svod.compile.plan.plan_parts import BufferKind, VariableSpec
from svod.compile.plan.unbound_plan import BufferSpec, Call, UnboundPlan, call_sizes, named_kernels
from svod.core.ir.dtype import BY_NAME, dtypes
from svod.core.ir.serialize import ast_to_data, data_to_ast
from svod.core.ir.uop import Ops
from svod.core.kernel.kernel import Kernel
from svod.core.machine.target import Target
from svod.core.schedule.family import family_key
from svod.errors import FormatError, SvodError, TuneError
from svod.system.checked import checked
from svod.system.files import write_text
from svod.system.forksafe import remake_after_fork
from svod.system.process import program
from svod.system.process.streams import tell
from svod.tune.plans.alternatives import PlanGraph
from svod.tune.plans.forms import ConvolutionForm, Forms, key_of

log = logging.getLogger("svod")

FORMAT, VERSION = "svod-capture", 4
RECORDS_FORMAT = "svod-tune-db"     # the format of tuning records, which users may give by mistake
STOP_FILE = "stop"
FLUSH_SECONDS = 0.5         # seconds between writes of the numbers of runs
MAKE_ONE = "make a capture with svod-tune --capture-to FILE SCRIPT"
MAX_ELEMENTS = 1 << 40      # most elements that a buffer in a capture may have


class StopCapture(BaseException):
    """Ends the captured script. It is not an Exception, so that the script's own handlers let it pass."""


class Counted(Protocol):
    """An object that counts its runs, such as an ExecutionPlan."""

    runs: int


# -- the lines ----------------------------------------------------------------------------------------------------------

Elements = Annotated[int, Meta(ge=0, le=MAX_ELEMENTS)]
Number = Annotated[int, Meta(ge=0, le=1 << 40)]         # the index of a buffer, or the level of a call
Seconds = Annotated[float, Meta(gt=0, le=float_info.max)]


class BufferRow(NamedTuple):
    """A buffer of a plan: its dtype, number of elements and kind."""

    dtype: str
    size: Elements
    kind: BufferKind


class CallRow(NamedTuple):
    """A `Call` of a plan, with the same fields. `args`: the indices of its buffers; `offsets`: the element of each of these buffers at
    which the kernel's operand begins."""

    kernel: str
    args: tuple[Number, ...]
    name: str
    origin: str
    why: str
    level: Number
    offsets: tuple[Elements, ...]
    variables: tuple[VariableSpec, ...]


@dataclass(frozen=True)
class KernelLine:
    """A line that describes a kernel: its key, and its AST as data."""

    kernel: str
    ast: Any


@dataclass(frozen=True)
class PlanLine:
    """A line that describes a plan, named by its digest. `seconds`: the seconds of one call, by kernel key."""

    plan: str
    target: str
    calls: tuple[CallRow, ...]
    buffers: tuple[BufferRow, ...]
    outputs: tuple[Number, ...]
    seconds: dict[str, Seconds]


@dataclass(frozen=True)
class FormLine:
    """A line that describes the form of a convolution (`ConvolutionForm`, whose `key` is `form`) in the plan with the digest `of`. `other`:
    the plan with its other form, if both are worth timing."""

    form: str
    of: str
    target: str
    described: str
    lengths: Annotated[tuple[Number, ...], Meta(min_length=1, max_length=8)]
    is_transformed: bool
    why: str
    is_open: bool
    other: PlanLine | None

    @property
    def content(self) -> ConvolutionForm:
        return ConvolutionForm(self.form, self.described, self.lengths, self.is_transformed, self.why, self.is_open)


@dataclass(frozen=True)
class GraphLine:
    """A line that describes the graph of the plan with the digest `of` (`PlanGraph`). `constants`: positions of its weights among its
    BUFFERs."""

    graph: dict[str, Any]
    of: str
    constants: list[Number]


@dataclass(frozen=True)
class RunsLine:
    """A line that counts the runs so far (`count`) of the plan with the digest `runs`."""

    runs: str
    count: Annotated[int, Meta(ge=0, le=1 << 60)]


# -- writing ------------------------------------------------------------------------------------------------------------

def append(directory: str | os.PathLike[str], unbound: UnboundPlan, seconds: Mapping[str, float], *, target: Target,
           plan: Counted | None = None, forms: Forms = (), graph: PlanGraph | None = None) -> None:
    """Add a prepared plan to this process's file in `directory`, which is created if need be.

    `seconds`: the seconds of one call, by key, of the kernels that were timed. `target`: the plan's target. `plan`: an object whose `runs`
    are counted, as at least one; None counts as one run. `forms`: the forms of its convolutions; `graph`: its graph, if it may have
    alternatives. Raises TuneError when nothing can be written, StopCapture when the capture has ended."""
    _recorder_for(Path(directory)).append(unbound, seconds, target, plan, forms, graph)
    check_stop(directory)


def announce(directory: str | os.PathLike[str], unbound: UnboundPlan, *, target: Target) -> None:
    """Add the kernels of a plan before they are compiled, so that a watcher of the capture can get ready. Raises the errors of `append`."""
    _recorder_for(Path(directory)).announce(unbound, target)
    check_stop(directory)


def check_stop(directory: str | os.PathLike[str]) -> None:
    """Raise StopCapture if `request_stop` was called for `directory`."""
    if os.path.exists(os.path.join(directory, STOP_FILE)):
        _silence_stop()
        raise StopCapture(f"the capture in {os.fspath(directory)} has ended")


def request_stop(directory: str | os.PathLike[str]) -> None:
    """Have every process that is captured into `directory` end at its next `prepare`. Raises OSError."""
    Path(directory, STOP_FILE).touch()


class _Runs:
    """Counts the runs in this process of all plans with the same digest, also of plans that have been deleted since."""

    def __init__(self) -> None:
        self.finished = 0
        self.live: list[tuple[weakref.ref[Counted], int]] = []
        self.written = 0

    def add(self, plan: Counted | None) -> None:
        if plan is None:
            self.finished += 1
        else:
            self.live.append((weakref.ref(plan), 1))

    def total(self) -> int:
        """The number of runs so far of all these plans. Each plan counts as run at least once, as it may be deleted before its runs are
        read."""
        live = []
        for ref, seen in self.live:
            plan = ref()
            if plan is None:
                self.finished += seen
            else:
                live.append((ref, max(1, plan.runs)))
        self.live = live
        return self.finished + sum(seen for _, seen in live)


class _Recorder:
    """Writes the plans of this process to a file of its own in the capture's directory."""

    def __init__(self, directory: Path) -> None:
        self.pid = os.getpid()
        self.path = directory / f"{self.pid}-{uuid.uuid4().hex[:8]}.jsonl"
        self._lock = threading.Lock()
        self._kernels: set[tuple[str, str]] = set()
        self._only_in_forms: set[tuple[str, str]] = set()
        self._runs: dict[str, _Runs] = {}
        try:
            directory.mkdir(parents=True, exist_ok=True)
            self._file = os.open(self.path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o644)
        except OSError as e:
            raise TuneError(f"kernels cannot be captured into {directory}: {e.strerror or e}; set SVOD_CAPTURE to a directory that can be "
                            "written, or unset it") from e
        self._write([header()])
        atexit.register(self.flush)
        threading.Thread(target=self._flush_now_and_then, name="svod-capture", daemon=True).start()

    def announce(self, unbound: UnboundPlan, target: Target) -> None:
        with self._lock:
            self._write([*kernel_lines(unbound, target.key, self._kernels)])

    def append(self, unbound: UnboundPlan, seconds: Mapping[str, float], target: Target, plan: Counted | None, forms: Forms,
               graph: PlanGraph | None) -> None:
        with self._lock:
            digest = plan_digest(unbound, target.key)
            new = digest not in self._runs
            self._runs.setdefault(digest, _Runs()).add(plan)
            if new:
                self._write([*kernel_lines(unbound, target.key, self._kernels), plan_line(unbound, seconds, target.key),
                             *form_lines(forms, digest, target.key, self._kernels, self._only_in_forms), *graph_lines(graph, digest)])

    def flush(self) -> None:
        """Write the numbers of runs that have changed. Never raises, as it runs at exit and in a thread of the captured script."""
        if os.getpid() != self.pid:
            return
        with self._lock:
            lines: list[dict[str, Any]] = []
            for digest, runs in self._runs.items():
                total = runs.total()
                if total != runs.written:
                    runs.written = total
                    lines.append({"runs": digest, "count": total})
            try:
                self._write(lines)
            except TuneError as e:
                tell(f"svod: {e}")

    def _flush_now_and_then(self) -> None:
        while True:
            time.sleep(FLUSH_SECONDS)
            self.flush()

    def _write(self, lines: list[dict[str, Any]]) -> None:
        if not lines:
            return
        data = to_text(lines).encode()
        try:
            while data:
                data = data[os.write(self._file, data):]
        except OSError as e:
            raise TuneError(f"kernels cannot be captured into {self.path}: {e.strerror or e}") from e


_recorders: dict[Path, _Recorder] = {}
_recorders_lock = threading.Lock()
remake_after_fork(sys.modules[__name__], "_recorders_lock", threading.Lock)
remake_after_fork(sys.modules[__name__], "_recorders", dict)


def _recorder_for(directory: Path) -> _Recorder:
    with _recorders_lock:
        recorder = _recorders.get(directory)
        if recorder is None or recorder.pid != os.getpid():       # after a fork the file belongs to the parent
            recorder = _recorders[directory] = _Recorder(directory)
        return recorder


def _silence_stop() -> None:
    """Have an uncaught StopCapture end the process without a traceback."""
    before = sys.excepthook

    def hook(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        if not issubclass(kind, StopCapture):
            before(kind, error, trace)
    sys.excepthook = hook


# -- lines --------------------------------------------------------------------------------------------------------------

def header() -> dict[str, Any]:
    try:
        version = metadata.version("svod")
    except metadata.PackageNotFoundError:       # svod runs from a checkout that is not installed
        version = ""
    return {"format": FORMAT, "version": VERSION, "svod": version, "python": sys.version.split()[0], "command": program.command()}


def to_text(lines: Iterable[dict[str, Any]]) -> str:
    return "".join(json.dumps(line, separators=(",", ":"), allow_nan=False) + "\n" for line in lines)


def kernel_lines(unbound: UnboundPlan, target: str, written: set[tuple[str, str]]) -> Iterator[dict[str, Any]]:
    """The lines that describe a plan's kernels, except those whose (key, target) is in `written`; the pairs of the others are added to
    it. A kernel has the name of its first call."""
    named = named_kernels(unbound.calls)
    for key, kernel in unbound.kernels.items():
        if (key, target) not in written:
            written.add((key, target))
            yield {"kernel": key, "target": target, "name": named[key].name if key in named else "", "structure": family_key(kernel.ast),
                   "ast": ast_to_data(kernel.ast)}


def plan_line(unbound: UnboundPlan, seconds: Mapping[str, float], target: str) -> dict[str, Any]:
    return {"plan": plan_digest(unbound, target), "target": target,
            "calls": [[c.kernel, list(c.args), c.name, c.origin, c.why, c.level, list(c.offsets), _variables(c)] for c in unbound.calls],
            "buffers": [[b.dtype.name, b.size, b.kind] for b in unbound.buffers],
            "outputs": list(unbound.outputs),
            "seconds": {k: v for k, v in seconds.items() if math.isfinite(v) and v > 0}}


def form_lines(forms: Forms, plan: str, target: str, kernels: Collection[tuple[str, str]],
               written: set[tuple[str, str]]) -> Iterator[dict[str, Any]]:
    """The lines that describe the forms of the convolutions of the plan with the digest `plan`, and the kernels that only their other forms
    have. `kernels`, `written`: the (key, target) of the kernels of plans, and of other forms, that have lines."""
    for form, other in forms:
        if other is not None:
            known = written.union(kernels)
            yield from ({**line, "only_in_form": True} for line in kernel_lines(other, target, known))
            written |= known.difference(kernels)
        yield {"form": form.key, "of": plan, "target": target, "described": form.described, "lengths": list(form.lengths),
               "is_transformed": form.is_transformed, "why": form.why, "is_open": form.is_open,
               "other": None if other is None else plan_line(other, {}, target)}


def graph_lines(graph: PlanGraph | None, plan: str) -> Iterator[dict[str, Any]]:
    """The line that describes the graph of the plan with the digest `plan`; none if the graph has no form as data."""
    try:
        data = None if graph is None else ast_to_data(graph.sink)
    except FormatError as e:
        log.debug("the graph of a plan is not captured: %s", e)
        return
    if graph is not None and data is not None:
        yield {"graph": data, "of": plan, "constants": [i for i, b in enumerate(graph.buffers) if b in graph.constants]}


def _variables(call: Call) -> list[Any]:
    return [[v.name, v.min, v.max, list(v.hints), v.bucket and list(v.bucket)] for v in call.variables]


def plan_digest(unbound: UnboundPlan, target: str) -> str:
    """A digest of a plan's calls, buffers, outputs and target, without names. It identifies the plan."""
    content = [target, [[c.kernel, list(c.args), c.level, list(c.offsets), _variables(c)] for c in unbound.calls],
               [[b.dtype.name, b.size, b.kind] for b in unbound.buffers], list(unbound.outputs)]
    return hashlib.blake2b(json.dumps(content, separators=(",", ":")).encode(), digest_size=16).hexdigest()


# -- reading ------------------------------------------------------------------------------------------------------------

@dataclass
class CapturedPlan:
    """One captured plan. `runs`: its runs in all processes. `seconds`: seconds of one call, by key, of the kernels that were timed."""

    digest: str
    target: str
    unbound: UnboundPlan
    seconds: dict[str, float]
    runs: int = 0


class CapturedForm(NamedTuple):
    """The form of a convolution in the plan with the digest `plan`, and the plan that has its other form; None: it is not worth timing."""

    form: ConvolutionForm
    plan: str
    other: CapturedPlan | None


@dataclass
class Capture:
    """The content of a capture. `problems`: the lines that were skipped, and why. `forms`: the forms of the plans' convolutions;
    `graphs`: the graphs of plans that may have alternatives, by the digests of the plans."""

    plans: list[CapturedPlan] = field(default_factory=list)
    forms: list[CapturedForm] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)
    commands: list[list[str]] = field(default_factory=list)
    graphs: dict[str, PlanGraph] = field(default_factory=dict)

    @property
    def kernels(self) -> dict[str, Kernel]:
        """Every kernel by its key, in the order of the plans."""
        return {key: kernel for plan in self.plans for key, kernel in plan.unbound.kernels.items()}

    @property
    def in_other_forms(self) -> list[CapturedPlan]:
        """The plans with other forms of convolutions, each with the runs of the plan that it stands for."""
        runs = {plan.digest: plan.runs for plan in self.plans}
        return [replace(f.other, runs=runs[f.plan]) for f in self.forms if f.other is not None and f.plan in runs]

    def with_plans(self, new: Mapping[str, CapturedPlan]) -> Capture:
        """The capture with other plans, by the digests of those whose place they take."""
        digests = {old: plan.digest for old, plan in new.items()}
        forms = [f._replace(plan=digests.get(f.plan, f.plan)) for f in self.forms]
        graphs = {digests.get(digest, digest): graph for digest, graph in self.graphs.items()}
        return replace(self, plans=[new.get(p.digest, p) for p in self.plans], forms=forms, graphs=graphs)

    def with_other_forms(self, keys: Collection[str]) -> Capture:
        """The capture with plans in which the convolutions with these keys have their other form. A plan with several of them has the other
        form of the first one only, as no plan with more was captured."""
        others = {f.plan: f.other for f in reversed(self.forms) if f.other is not None and f.form.key in keys}
        return replace(self, plans=[p if (other := others.get(p.digest)) is None else replace(other, runs=p.runs, seconds=p.seconds)
                                    for p in self.plans])


def read_capture(path: str | os.PathLike[str]) -> Capture:
    """The plans in a capture file, or in all capture files of a directory, merged.

    Raises FormatError for a file that is no capture or has another version, TuneError where nothing can be read."""
    root = Path(path)
    try:
        files = sorted(root.glob("*.jsonl")) if root.is_dir() else [root]
        texts = [(file, file.read_bytes()) for file in files]
    except OSError as e:
        raise TuneError(f"the capture {root} cannot be read: {e.strerror or e}; {MAKE_ONE}") from e
    capture = Capture()
    plans: dict[str, CapturedPlan] = {}
    for file, data in texts:
        if data or file == root:    # a process that was killed before it wrote leaves an empty file
            _Reader(file, capture, plans).read(data, whole=file == root)
    capture.plans = list(plans.values())
    return capture


def write_capture(path: str | os.PathLike[str], capture: Capture) -> None:
    """Write a capture as one file that `read_capture` reads. Raises FileError."""
    lines = [header() | ({"command": capture.commands[0]} if capture.commands else {})]
    written, only_in_forms = set[tuple[str, str]](), set[tuple[str, str]]()
    for plan in capture.plans:
        forms = [(f.form, None if f.other is None else f.other.unbound) for f in capture.forms if f.plan == plan.digest]
        lines += [*kernel_lines(plan.unbound, plan.target, written), plan_line(plan.unbound, plan.seconds, plan.target),
                  *form_lines(forms, plan.digest, plan.target, written, only_in_forms),
                  *graph_lines(capture.graphs.get(plan.digest), plan.digest), {"runs": plan.digest, "count": plan.runs}]
    write_text(Path(path), to_text(lines))


class _Reader:
    """Reads one capture file, and adds its content to `capture` and `plans`."""

    def __init__(self, file: Path, capture: Capture, plans: dict[str, CapturedPlan]) -> None:
        self.file, self.capture, self.plans = file, capture, plans
        self.kernels: dict[str, Kernel] = {}
        self.runs: dict[str, RunsLine] = {}

    def read(self, data: bytes, *, whole: bool) -> None:
        """Read the file's content. With `whole` False its last line may be cut off, as its process may have been killed."""
        if not data.strip():
            raise FormatError(f"{self.file} is empty; {MAKE_ONE}")
        lines = data.split(b"\n")
        complete = not lines[-1]
        for number, line in enumerate(lines, 1):
            if not line:
                continue
            cut = number == len(lines) and not complete
            try:
                value = _parse(line)
                if number == 1:
                    self._header(value)
                else:
                    self._line(value)
            except Exception as e:  # an untrusted line may raise anything, and the others are still read
                if number == 1:
                    raise FormatError(f"{self.file} is not a capture of svod that can be used: line 1{' is cut off' * cut}: {e}; "
                                      f"{MAKE_ONE}") from e
                if cut and not whole:
                    continue
                where = f"{self.file.name}, line {number}"
                reason = str(e) if isinstance(e, SvodError) else f"{type(e).__name__}: {e!s:.200}"
                self.capture.problems.append(f"{where} is cut off, the end of the file is missing" if cut else f"{where}: {reason}")
        for digest, counted in self.runs.items():
            if digest in self.plans:
                self.plans[digest].runs += counted.count

    def _header(self, line: dict[str, Any]) -> None:
        if line.get("format") == RECORDS_FORMAT:
            raise FormatError("it holds tuning records, which svod-db import reads")
        if line.get("format") != FORMAT:
            raise FormatError(f"it does not say {FORMAT!r}")
        version = line.get("version")
        if version != VERSION:
            raise FormatError(f"it has version {version!r}, this svod reads {VERSION}; capture again with this one")
        command = line.get("command")
        if isinstance(command, list) and all(isinstance(c, str) for c in command):
            self.capture.commands.append(command)

    def _line(self, line: dict[str, Any]) -> None:
        if "kernel" in line:
            self._kernel(_checked(line, KernelLine))
        elif "plan" in line:
            plan = self._plan(_checked(line, PlanLine))
            self.plans.setdefault(plan.digest, plan).seconds.update(
                {k: min(v, self.plans[plan.digest].seconds.get(k, v)) for k, v in plan.seconds.items()})
            self.runs.setdefault(plan.digest, RunsLine(plan.digest, 1))
        elif "form" in line:
            self._form(_checked(line, FormLine))
        elif "graph" in line:
            self._graph(_checked(line, GraphLine))
        elif "runs" in line:
            counted = _checked(line, RunsLine)
            self.runs[counted.runs] = replace(counted, count=max(1, counted.count))
        else:
            raise FormatError(f"it is neither a kernel nor a plan, nor a form, nor a graph: {sorted(map(str, line))[:4]}")

    def _graph(self, line: GraphLine) -> None:
        graph = PlanGraph(data_to_ast(line.graph))
        if graph.sink.op is not Ops.SINK or any(i >= len(graph.buffers) for i in line.constants):
            raise FormatError("the graph of a plan is a SINK, and its constants are positions of its BUFFERs")
        self.capture.graphs[line.of] = graph._replace(constants=frozenset(graph.buffers[i] for i in line.constants))

    def _kernel(self, line: KernelLine) -> None:
        kernel = Kernel(data_to_ast(line.ast))
        if kernel.key != line.kernel:
            raise FormatError(f"kernel {line.kernel[:12]} has the key {kernel.key[:12]} here: it was captured by another version of svod")
        self.kernels[line.kernel] = kernel

    def _plan(self, line: PlanLine) -> CapturedPlan:
        buffers = tuple(_buffer(b) for b in line.buffers)
        calls = tuple(self._call(c, buffers) for c in line.calls)
        if not calls or any(b.level < a.level for a, b in pairwise(calls)):
            raise FormatError("the calls of a plan must be in order of their levels")
        for o in line.outputs:
            if _at(buffers, o).kind == "intermediate":
                raise FormatError(f"output {o} of a plan is an intermediate buffer")
        unbound = UnboundPlan(calls, buffers, line.outputs, {c.kernel: self.kernels[c.kernel] for c in calls})
        digest = plan_digest(unbound, line.target)
        if line.plan != digest:
            raise FormatError(f"plan {line.plan!r:.40} was altered: its content has the digest {digest}")
        return CapturedPlan(digest, line.target, unbound, {k: v for k, v in line.seconds.items() if k in unbound.kernels})

    def _form(self, line: FormLine) -> None:
        form = line.content
        if form.key != key_of(form.described):
            raise FormatError(f"convolution {form.key!r:.40} was altered: its description has the key {key_of(form.described)}")
        found = CapturedForm(form, line.of, None if line.other is None else self._plan(line.other))
        if all((f.form.key, f.plan) != (form.key, line.of) for f in self.capture.forms):
            self.capture.forms.append(found)

    def _call(self, row: CallRow, buffers: tuple[BufferSpec, ...]) -> Call:
        key = row.kernel[:12]
        kernel = self.kernels.get(row.kernel)
        if kernel is None:
            raise FormatError(f"a plan calls kernel {key}, which could not be read")
        if len(row.args) != len(kernel.params):
            raise FormatError(f"kernel {key} takes {len(kernel.params)} buffers, a call gives {len(row.args)}")
        if len(row.offsets) != len(row.args):
            raise FormatError(f"kernel {key} takes {len(row.args)} buffers, a call gives {len(row.offsets)} offsets")
        for v in row.variables:
            if not 0 <= v.min <= v.max <= MAX_ELEMENTS or any(not v.min <= x <= v.max for x in (*v.bounds, *v.hints)) \
                    or list(v.bounds) != sorted(v.bounds):
                raise FormatError(f"variable {v.name} cannot be {v.min} to {v.max} with the hints {list(v.hints)} and the bucket "
                                  f"{v.bucket}")
        for own, (low, high) in kernel.variables.items():
            number = int(own[1:])
            if number >= len(row.variables) or not low <= min(row.variables[number].bounds) <= max(row.variables[number].bounds) <= high:
                raise FormatError(f"kernel {key} has the variables {kernel.variables}, a call gives {row.variables!r:.80}")
        for p, n, offset, size in zip(kernel.params, row.args, row.offsets, call_sizes(kernel, row.variables), strict=True):
            buffer = _at(buffers, n)
            if buffer.dtype is not p.dtype or buffer.size < offset + size:
                raise FormatError(f"kernel {key}, slot {p.arg.slot}: {size} × {p.dtype.name} from {offset} on are needed, buffer {n} "
                                  f"has {buffer.size} × {buffer.dtype.name}")
            if p.arg.slot in kernel.outs and buffer.kind == "constant":
                raise FormatError(f"kernel {key} writes buffer {n}, a constant")
        return Call(**row._asdict())


def _buffer(row: BufferRow) -> BufferSpec:
    dtype = BY_NAME.get(row.dtype)
    if dtype is None or dtype in (dtypes.void, dtypes.index):
        raise FormatError(f"a buffer of dtype {row.dtype!r:.40} is not known")
    return BufferSpec(dtype, row.size, row.kind)


def _at(buffers: tuple[BufferSpec, ...], number: int) -> BufferSpec:
    if number >= len(buffers):
        raise FormatError(f"buffer {number} of a plan is not among its {len(buffers)}")
    return buffers[number]


def _parse(line: bytes) -> dict[str, Any]:
    try:
        value = json.loads(line)
    except UnicodeDecodeError as e:
        raise FormatError("it is not text") from e
    except ValueError as e:
        raise FormatError(f"it is not JSON: {e}") from e
    if not isinstance(value, dict):
        raise FormatError("it is not a JSON object")
    return value


def _checked(line: dict[str, Any], kind: Any) -> Any:
    return checked(line, kind, FormatError)


# -- watching -----------------------------------------------------------------------------------------------------------

@dataclass
class News:
    """New lines of a capture: keys of kernels, and for each plan the seconds that one run spends in each timed kernel, by kernel key."""

    kernels: list[str] = field(default_factory=list)
    plans: list[dict[str, float]] = field(default_factory=list)

    def __bool__(self) -> bool:
        return bool(self.kernels or self.plans)


class CaptureWatch:
    """Reports new kernels and plans in a capture directory while it is written."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self._read: dict[Path, int] = {}
        self.seen: set[str] = set()

    def poll(self) -> News:
        """Read the lines that were added since the last call, and return the kernels and plans in them."""
        new = News()
        for file in sorted(self.directory.glob("*.jsonl")):
            with file.open("rb") as f:
                f.seek(self._read.get(file, 0))
                data = f.read()
            end = data.rfind(b"\n") + 1
            self._read[file] = self._read.get(file, 0) + end
            for line in data[:end].splitlines():
                # svod writes exactly these prefixes, so that the long AST after them need not be parsed
                if line.startswith(b'{"kernel":"'):
                    key = line[11:11 + 64].split(b'"', 1)[0].decode(errors="replace")
                    if key not in self.seen:
                        self.seen.add(key)
                        new.kernels.append(key)
                elif line.startswith(b'{"plan":"'):
                    with contextlib.suppress(SvodError, KeyError, TypeError, ValueError):    # `read_capture` reports what is wrong
                        new.plans.append(_spent(_parse(line)))
        return new


def _spent(plan: dict[str, Any]) -> dict[str, float]:
    """The seconds that one run of a plan spends in each kernel. `plan`: the plan's line, parsed."""
    spent: dict[str, float] = {}
    for key, *_ in plan["calls"]:
        if key in plan["seconds"]:
            spent[key] = spent.get(key, 0.0) + plan["seconds"][key]
    return spent
