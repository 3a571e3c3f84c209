"""Makes an execution plan of tensors: the pipeline of docs/layout.md, composed.

    graph → create_schedule → unbound (kernels, buffers, order) → a chain and code per distinct kernel → ExecutionPlan
"""
from __future__ import annotations

import math
import sys
import threading
from collections.abc import Callable, Container, Iterable, Mapping, Sequence
from dataclasses import replace
from functools import cache, partial
from itertools import product
from typing import Any, NamedTuple, cast

import numpy as np

from svod.compile.backend import Backend, device_named
from svod.compile.plan.execution_plan import ExecutionPlan
from svod.compile.plan.host_item import BufferCopy
from svod.compile.plan.memory_planner import PlannerMode
from svod.compile.plan.observe import observe
from svod.compile.plan.plan_parts import BufferKind, VariableSpec
from svod.compile.plan.unbound_plan import BufferSpec, Call, UnboundPlan, build_plan
from svod.config import PrepareConfig
from svod.core.graph import graph
from svod.core.graph.buffer import Buffer, buffer_of
from svod.core.graph.callback import HostCall, HostFunction, calls_back, functions_of, host_call
from svod.core.graph.channels import channels_last, with_values
from svod.core.graph.derived import find_derived, remember_derived
from svod.core.graph.devices import device_of
from svod.core.graph.shapes import shape_of
from svod.core.graph.storage import base_of, content_under
from svod.core.graph.written import WrittenMemory, span_of
from svod.core.ir.uop import MOVEMENT, Ops, UOp
from svod.core.ir.variable import without_binds
from svod.core.kernel.intrinsics import holds_tiles_of
from svod.core.kernel.kernel import Kernel
from svod.core.machine.target import DISK, FAST, HOST
from svod.core.schedule.cut import BY_RULES, Deviations
from svod.core.schedule.kernel_variables import buckets_of, in_bucket
from svod.core.schedule.schedule import Schedule, copies_to, create_schedule
from svod.core.schedule.schedule_cache import schedule_of
from svod.core.schedule.schedule_check import check_schedule
from svod.errors import ConfigError, DeviceError, ScheduleError
from svod.system.forksafe import remake_after_fork
from svod.system.process.collector import rare_collections
from svod.tensor.base import TensorBase
from svod.tensor.realize import constant_value, last_contents
from svod.tensor.replacement import Computing
from svod.tune.chains import choose_each, opts_by_key
from svod.tune.fast.at_prepare import FastPlan, fast_plan
from svod.tune.first_forms import has_first_forms
from svod.tune.measure.plan_sizes import profile_at_sizes
from svod.tune.plan_chains import compile_unbound_plan
from svod.tune.plans.alternatives import PlanGraph, deviations_of
from svod.tune.plans.convolutions import Rewritten, with_transforms
from svod.tune.plans.forms import Forms
from svod.tune.plans.plan_search import can_be_searched, plan_record
from svod.tune.resolved import Resolved, database, resolve

Array = np.ndarray[Any, Any]

MOST_VARIANTS = 64     # maximum number of kernels that one kernel is split into, one for each combination of buckets of its variables
MOST_LISTS = 256       # maximum number of launch lists of a plan, one for each combination of buckets of all its variables

_IN_MEMORY = Ops.BUFFER, Ops.UNIQUE, Ops.DEVICE

_kernels: dict[UOp, Kernel] = {}
_lock = threading.Lock()
remake_after_fork(sys.modules[__name__], "_lock", threading.Lock)


# -- the functions that tensors call ----------------------------------------------------------------

def prepare_tensors(tensors: Sequence[TensorBase], config: PrepareConfig | None, constants: Sequence[TensorBase] = ()) -> ExecutionPlan:
    """Make the plan that computes tensors. They become its outputs, and every `execute()` writes them again; their memory cannot be read
    before the first run. `constants`: tensors that are not written any more, such as weights. Stages that read only constants run once,
    here. Constants that the plan does not read are ignored.

    Raises ScheduleError without tensors, and for a constant that has no memory of its own or that has a pending assignment."""
    if not tensors:
        raise ScheduleError("prepare needs at least one tensor")
    config = complete_config(config)
    with Computing(tensors) as work:
        fixed = _buffers_of(constants) & buffers_under(work.roots)
        prepared = prepare_graph(work.roots, resolve(config), fixed if config.constants == "auto" else frozenset())
        prepared.attach(work, takes_over=True)
    made = [buffer_of(prepared.nodes[i]) for i in dict.fromkeys(prepared.unbound.outputs) if prepared.is_new(i)]
    prepared.plan.open_after_run(made, "the values of a prepared tensor were asked for before its plan ran; call plan.execute() first")
    return prepared.plan


def _buffers_of(constants: Sequence[TensorBase]) -> frozenset[UOp]:
    """Return the BUFFERs of the tensors in `constants`; a tensor whose value needs no memory has none. Raises ScheduleError."""
    slots = set()
    for t in constants:
        base = base_of(t.uop)
        under = content_under(base)
        if base.op is Ops.BUFFER:
            slots.add(base)
        elif under is not None and under.op is Ops.AFTER:
            raise ScheduleError("a tensor in constants= has an assignment still to be done; call its realize() before, or take it out")
        elif under is not None:
            raise ScheduleError("a tensor in constants= is a view; give the tensor that it is a view of")
        elif constant_value(base) is None:
            raise ScheduleError(f"a tensor in constants= is still to be computed ({base.op.value}); call its realize() before")
    return frozenset(slots)


def complete_config(config: PrepareConfig | None) -> PrepareConfig:
    """Return a configuration with open fields set from the environment. Raises ConfigError unless `config` is a PrepareConfig or None."""
    if config is not None and not isinstance(config, PrepareConfig):
        raise ConfigError(f"a PrepareConfig is needed, got {type(config).__name__}; for a search: PrepareConfig(beam=BeamConfig(width=4))")
    try:
        return PrepareConfig.of_environment() if config is None else config.in_environment()
    except ConfigError as e:
        raise e.with_traceback(None) from None      # without this function's traceback, which says nothing about the wrong variable


# -- the pipeline -----------------------------------------------------------------------------------

class Prepared:
    """A plan, with the BUFFER node of each of its buffer numbers."""

    def __init__(self, plan: ExecutionPlan, unbound: UnboundPlan, nodes: tuple[UOp, ...], numbers: Mapping[UOp, int],
                 overwritten: frozenset[int], chosen: frozenset[str] = frozenset()):
        self.plan, self.unbound = plan, unbound
        self.nodes = nodes               # the BUFFER of each buffer number; keeps alive the BUFFERs that the plan created
        self.numbers = numbers           # BUFFER of the graph → buffer number
        self.overwritten = overwritten   # numbers of the BUFFERs of the graph that the plan writes
        self.chosen = chosen             # the keys of the alternatives that the plan has

    @property
    def outputs(self) -> tuple[UOp, ...]:
        """The BUFFERs of the outputs, in the order of the nodes that were passed to `prepare_graph`."""
        return tuple([self.nodes[i] for i in self.unbound.outputs])

    def new_buffer(self, number: int) -> UOp:
        """Make a new BUFFER of the size, dtype and device of a buffer, given by its number."""
        spec = self.unbound.buffers[number]
        return graph.buffer(spec.dtype, spec.size, self.device_of(number))

    def device_of(self, number: int) -> str:
        """Return the device of a buffer in the graph."""
        return str(self.nodes[number].src[1].arg)

    def is_new(self, number: int) -> bool:
        """Whether the plan created the buffer; otherwise it is a BUFFER of the graph."""
        return self.nodes[number] not in self.numbers

    def attach(self, work: Computing, *, takes_over: bool = False) -> None:
        """Make the tensors the plan's outputs; with `takes_over` even if another thread has computed them meanwhile. Tensors with a pending
        assignment become views of the memory that the plan writes.

        Raises ScheduleError unless there is an output for each."""
        if len(work.roots) != len(self.unbound.outputs):
            raise ScheduleError(f"a batch of {len(work.roots)} tensors is attached to a plan with {len(self.unbound.outputs)} outputs; a "
                                "plan has one for each tensor that it was prepared for")
        done = last_contents(work.roots)
        for root, i in zip(work.roots, self.unbound.outputs, strict=True):
            base = base_of(root)
            # a constant is not replaced: every tensor that contains it shares its node
            if base.op is not Ops.BUFFER and constant_value(base) is None:
                done[base] = graph.storage_view(self.nodes[i], shape_of(base))
        work.replace(done, takes_over=takes_over)


@rare_collections()
def prepare_graph(outputs: Sequence[UOp], resolved: Resolved, constants: frozenset[UOp] = frozenset(),
                  inputs: frozenset[UOp] = frozenset()) -> Prepared:
    """Prepare a plan for graph nodes. BUFFERs in `constants` are weights of the plan; those in `inputs` are bound before each run.

    Values on the CPU are computed by the device of `resolved`, values on another device by that device.

    Raises DeviceError for an operation on values of two devices, ConfigError for options `opts` that fit no kernel, ScheduleError if memory
    that the plan writes overlaps another of its buffers."""
    config = resolved.config
    sink, values, _ = without_binds(graph.sink(*outputs))
    sink = arranged(sink, resolved)
    transforms = with_chosen_forms(sink, constants, resolved)
    both = both_forms(sink, constants, resolved, transforms)
    sink, constants = with_constants_turned(transforms.sink, constants | transforms.tables, lambda nodes: computed_now(nodes, resolved),
                                            transforms.weights)
    made = scheduled(sink, constants, resolved)
    unbound, buffers, numbers, places = made[:4]
    main = resolved.on(places.main)
    native = unbound.native
    given = opts_by_key(resolved.opts, unbound)
    nodes, arrays, storages = memory_of(unbound, buffers, inputs, places)
    overwritten = frozenset(c.args[s] for c in native.calls for s in unbound.kernels[c.kernel].outs
                            if buffers[c.args[s]].src[0].op is not Ops.LUNIQUE)
    if overwritten:         # raises if written memory overlaps another buffer
        WrittenMemory({i: span_of(b.host) for i, b in storages.items() if b.host is not None}, overwritten)
    captures = config.capture is not None and bool(native.calls)
    if captures:
        from svod.tune import capture
        capture.announce(str(config.capture), native, target=main.target)
    devices = dict.fromkeys(("", *(c.device for c in native.calls)))
    fast = fast_plan(unbound, arrays, storages, main, given) if main.target.numerics == FAST and len(devices) == 1 else None
    resolved = _for_others(fast, resolved)
    may_be_first = len(devices) == 1 and has_first_forms(config) and not (fast is not None and fast.is_open)
    rounded = fast.choices if fast is not None else None
    compiled = {name: compile_unbound_plan(unbound.on(name), given, resolved.on(name or places.main), may_be_first, rounded)
                for name in devices}
    code = compiled.pop("")
    plan = build_plan(unbound, code, arrays, threads=main.target.threads, planner=cast(PlannerMode, config.memory_planner),
                      device=main.target.device, storages=storages, elsewhere=compiled)
    plan.bindings.carried = overwritten
    if fast is not None:
        fast.attach(plan, code)
    plan.set_variables({name: value for name, value in values.items() if name in plan.variables})
    if config.debug or config.dump_after is not None:
        from svod.compile.plan.dump import dump  # imported late: the module imports the renderers of all passes, and few programs dump any
        dump(config, sink, constants, plan, made.deviations)
    observe(plan, config, main.compiler.pair)
    plan.keep = nodes           # the plan's addresses are valid while its buffers live
    plan.writes = tuple([buffer_of(nodes[i]) for i in sorted(overwritten.union(unbound.outputs))])
    if captures:
        capture.append(str(config.capture), native, seconds_by_kernel(plan, unbound), target=main.target, plan=plan, forms=both,
                       graph=made.graph)
    return Prepared(plan, unbound, tuple(nodes), numbers, overwritten, made.chosen)


def with_chosen_forms(sink: UOp, constants: frozenset[UOp], resolved: Resolved) -> Rewritten:
    """The graph with convolutions by transforms where these are faster; with BEAM, both forms of the convolutions that are worth it, and
    that have no times yet, are timed before."""
    transforms, beam = with_transforms(sink, constants, resolved), resolved.config.beam
    unknown = [form for form in transforms.forms if form.is_open and not form.is_measured] if beam is not None else []
    if beam is None or not unknown:
        return transforms
    from svod.tune.at_prepare import forms_at_prepare, settle_at_prepare  # imported here, as only searches need it
    if forms_at_prepare(unknown, partial(in_form, sink, constants, resolved), resolved, beam):
        plan = in_form(sink, constants, resolved)       # with the forms that are used from now on
        settle_at_prepare(plan, choose_each(plan.kernels, resolved.exact), resolved.exact, beam)
    return with_transforms(sink, constants, resolved)


def both_forms(sink: UOp, constants: frozenset[UOp], resolved: Resolved, transforms: Rewritten) -> Forms:
    """The forms of the convolutions of a graph that is captured, each with the plan in its other form if both are worth timing."""
    if resolved.config.capture is None:
        return ()
    return [(form, in_form(sink, constants, resolved, form.key) if form.is_open else None) for form in transforms.forms]


def in_form(sink: UOp, constants: frozenset[UOp], resolved: Resolved, other: str = "") -> UnboundPlan:
    """The kernels of a graph's plan in which the convolution with the key `other` has its other form ("": none has). Weights are not
    transformed: the plan is for timing over synthetic values."""
    def unfilled(nodes: Sequence[UOp]) -> dict[UOp, UOp]:
        return {u: graph.buffer(u.dtype, math.prod(shape_of(u))) for u in nodes}
    transforms = with_transforms(sink, constants, resolved, other)
    turned, constants = with_constants_turned(transforms.sink, constants | transforms.tables, unfilled, transforms.weights)
    schedule = schedule_of(turned, constants, remember=False, keeper=resolved.compiler)
    places = Places(schedule, resolved.target.device)
    return make_unbound_plan(schedule, constants, functions_of(turned), made_here=True, places=places)[0].native


class Scheduled(NamedTuple):
    """The unbound plan of a graph, the BUFFER of each buffer number, the number of each BUFFER, and the devices of its values. `graph`: the
    graph, if the plan may have alternatives; `chosen`: the keys of those that it has."""

    unbound: UnboundPlan
    buffers: list[UOp]
    numbers: dict[UOp, int]
    places: Places
    graph: PlanGraph | None = None
    chosen: frozenset[str] = frozenset()

    @property
    def deviations(self) -> Deviations:
        """What the plan does otherwise than by the rules."""
        return deviations_of(self.graph, self.chosen) if self.graph is not None else BY_RULES


def scheduled(sink: UOp, constants: frozenset[UOp], resolved: Resolved) -> Scheduled:
    """The plan of a graph with the alternatives that records choose. Raises ScheduleError."""
    remember, functions = not resolved.config.disable_schedule_cache, functions_of(sink)
    schedule = schedule_of(sink, constants, remember=remember, keeper=resolved.compiler)
    places = Places(schedule, resolved.target.device)
    made = make_unbound_plan(schedule, constants, functions, made_here=True, places=places)
    main = resolved.on(places.main)
    if not can_be_searched(made[0], main):
        return Scheduled(*made, places)
    graph = PlanGraph(sink, constants)
    chosen = chosen_for(made[0], graph, main)
    if chosen:
        schedule = schedule_of(sink, constants, " ".join(sorted(chosen)), partial(deviations_of, graph, chosen), remember=remember,
                               keeper=resolved.compiler)
        made = make_unbound_plan(schedule, constants, functions, made_here=True, places=places)
    return Scheduled(*made, places, graph, chosen)


def chosen_for(by_rules: UnboundPlan, graph: PlanGraph, resolved: Resolved) -> frozenset[str]:
    """The keys of the alternatives that the plan of a graph has, as records say; with BEAM, they are searched as far as they have not
    been."""
    record, beam = plan_record(by_rules, resolved), resolved.config.beam
    if beam is not None and (record is None or record.untried):
        from svod.tune.at_prepare import search_plan_at_prepare  # imported here, as only searches need it
        record = search_plan_at_prepare(by_rules, graph, partial(plan_with, graph, resolved), resolved, beam)
    return record.chosen if record is not None and record.is_faster else frozenset()


def plan_with(graph: PlanGraph, resolved: Resolved, deviations: Deviations) -> UnboundPlan:
    """The kernels of a graph's plan with some of its alternatives."""
    schedule = create_schedule(graph.sink, graph.constants, deviations)
    places = Places(schedule, resolved.target.device)
    return make_unbound_plan(schedule, graph.constants, functions_of(graph.sink), made_here=True, places=places)[0].native


def _for_others(fast: FastPlan | None, resolved: Resolved) -> Resolved:
    """The configuration for the kernels that are not rounded: without a search, if Ctrl-C has ended that of the rounded ones."""
    if fast is None or not fast.is_interrupted:
        return resolved
    return replace(resolved, config=replace(resolved.config, beam=None))


def device_called(name: str) -> str:
    """Return the name in graphs of the device that a user calls `name` ("cuda:0", "WebGPU"). Raises UnsupportedError for a device that
    svod does not know, and DeviceError for one that this machine lacks."""
    if name.upper().startswith(DISK):
        raise DeviceError(f"a copy to {name}: files are read only, Tensor.from_file; svod.nn.state.save writes files")
    return device_named(name).backend.target().device


def arranged(sink: UOp, resolved: Resolved) -> UOp:
    """Return the graph with operands of matrix instructions stored in the order of axes that these instructions read. Values on the CPU
    are arranged for the device that runs the plan, or for the device that kernels are captured for."""
    target_of = cache(resolved.target_of)

    def wanted(image: UOp) -> bool:
        name = device_of(image) or HOST
        if name.startswith(DISK):
            return False
        target = target_of((resolved.config.capture_device or resolved.target.device) if name == HOST else name)
        return holds_tiles_of(target, image.dtype)
    return channels_last(sink, wanted)


def with_constants_turned(sink: UOp, constants: frozenset[UOp],
                          buffers: Callable[[Sequence[UOp]], Mapping[UOp, UOp]],
                          transformed: Container[UOp] = frozenset()) -> tuple[UOp, frozenset[UOp]]:
    """Turn rearranged constants into weights: nodes that only reorder `constants`, or that are `transformed` ones, become BUFFERs, which
    `buffers` makes. Returns the graph with these BUFFERs, and `constants` with them added. Outputs are not replaced: their owner may write
    to them, and other plans share the BUFFERs."""
    turned: list[UOp] = []
    outputs = {base_of(u) for u in sink.src}
    for u in sink.toposort() if constants else ():
        content = list(u.walk(Ops.BUFFER)) if u.op is Ops.CONTIGUOUS and u not in outputs else []
        if content and constants.issuperset(content) \
                and (u in transformed or all(n.op in MOVEMENT or n.op in _IN_MEMORY for n in u.src[0].toposort())):
            turned.append(u)
    if not turned:
        return sink, constants
    made = buffers(turned)
    views = {u: graph.storage_view(storage, shape_of(u)) for u, storage in made.items()}
    return with_values(sink, views), constants.union(made.values())


def computed_now(nodes: Iterable[UOp], resolved: Resolved) -> dict[UOp, UOp]:
    """Return the BUFFER that holds the value of each node. Values that no earlier call has computed are computed now. On a device that
    only compiles, the BUFFERs stay empty."""
    stored = {node: found for node in nodes if (found := find_derived(_content(node), node)) is not None}
    new = [node for node in nodes if node not in stored]
    if new:
        # these kernels run only once: they are not worth a search, and do not belong to the captured model
        once = replace(resolved.config, beam=None, capture=None, opts={}, max_error=None)
        prepared = prepare_graph(new, replace(resolved, config=once, db=database(once), opts={}))
        if device_named(prepared.plan.device).backend.compiled_only is not None:
            return {**stored, **dict(zip(new, prepared.outputs, strict=True))}
        prepared.plan.execute()
        for node, storage in zip(new, prepared.outputs, strict=True):
            stored[node] = remember_derived(_content(node), node, storage)
    return stored


def _content(node: UOp) -> list[Buffer]:
    """Return the buffers that a value is computed from."""
    return [buffer_of(u) for u in node.walk(Ops.BUFFER)]


def space_of(device: str) -> Backend:
    """Return the backend of a device of the graph."""
    return device_named(device).backend


class Places:
    """The devices that compute a schedule's values: the requested device `asked` for values on the CPU, their own device for all others.
    `main`: the plan's device. It is the CPU if that runs any kernel, because its launches are the cheapest."""

    def __init__(self, schedule: Schedule, asked: str) -> None:
        self._named = {HOST: asked}     # device of the graph → device of the plan
        computed = [c.args[0].src[1].arg for c in schedule.calls if not copies_to(c.ast)]
        for name in computed:
            if name.startswith(DISK):
                raise DeviceError(f"a value is to be computed on {name}: a file holds values and computes none; copy it first, as a whole "
                                  f"or parts that are contiguous, .to({HOST!r})")
        computing = [self.device_of(name) for name in computed]
        others = [self.device_of(u.src[1].arg) for u in (*schedule.outputs, *(a for c in schedule.calls for a in c.args))]
        self.main = HOST if HOST in computing else next(iter((*computing, *others)), self.device_of(HOST))

    def device_of(self, name: str) -> str:
        """Return the device of the plan that computes values of the graph's device `name`."""
        if name.startswith(DISK):
            return HOST     # files are mapped to the host's memory
        if name not in self._named:
            self._named[name] = device_called(name)
        return self._named[name]

    def of_buffer(self, node: UOp) -> str:
        """Return the device of a BUFFER as the plan stores it: "" for the plan's main device."""
        device = self.device_of(node.src[1].arg)
        return "" if device == self.main else device

    def is_local(self, spec: BufferSpec) -> bool:
        """Whether kernels read a buffer in the host's memory."""
        return device_named(spec.device or self.main).backend.reads_host_memory


def memory_of(unbound: UnboundPlan, buffers: Sequence[UOp], inputs: frozenset[UOp],
              places: Places) -> tuple[list[UOp], list[Array | None], dict[int, Buffer]]:
    """Return three results by buffer number. Nodes: the BUFFER of each, a new one if the plan creates it. Arrays: the host arrays that
    kernels read; None for other buffers, and for content that kernels read in a file. Storages: the memory of each buffer, without
    intermediates and `inputs`, whose arrays are None, too."""
    nodes: list[UOp] = []
    arrays: list[Array | None] = []
    storages: dict[int, Buffer] = {}
    calls = [c for c in unbound.calls if c.kernel in unbound.functions or c.kernel in unbound.copies]
    in_python = {*unbound.outputs, *(arg for c in calls for arg in c.args)}
    for i, (u, spec) in enumerate(zip(buffers, unbound.buffers, strict=True)):
        array = None
        if spec.kind != "intermediate" and u.src[0].op is Ops.LUNIQUE:
            u = graph.buffer(spec.dtype, spec.size, u.src[1].arg)
        if spec.kind != "intermediate" and u not in inputs:
            storages[i] = buffer_of(u)
            in_file = storages[i].source is not None and i not in in_python
            array = storages[i].array if places.is_local(spec) and not in_file else None
        nodes.append(u)
        arrays.append(array)
    return nodes, arrays, storages


def seconds_by_kernel(plan: ExecutionPlan, unbound: UnboundPlan) -> dict[str, float]:
    """Measure the seconds of each kernel of a plan, by kernel key, in a few runs. Returns {} if inputs have no memory yet, or if a run
    would have side effects: the plan assigns to existing memory, or calls a Python function."""
    bound = all(b.has_memory for b in plan.buffers if b.kind != "intermediate")
    if not bound or plan.bindings.carried or unbound.functions:
        return {}
    seconds: dict[str, float] = {}
    for call, t in zip(unbound.calls, profile_at_sizes(plan, 2), strict=True):
        seconds[call.kernel] = min(t, seconds.get(call.kernel, t))
    return seconds


def make_unbound_plan(schedule: Schedule, constants: frozenset[UOp], functions: Mapping[int, HostFunction] | None = None, *,
                      made_here: bool = False, places: Places | None = None) -> tuple[UnboundPlan, list[UOp], dict[UOp, int]]:
    """Return the unbound plan of a schedule, the BUFFER of each buffer number, and the number of each BUFFER. `functions`: the Python
    functions that it calls, by token. `made_here`: `create_schedule` made the schedule, so it is not checked again. `places`: the devices
    of its values; None: all are on the plan's device.

    Raises ScheduleError for a schedule that cannot be run (`check_schedule`) and for more than `MOST_LISTS` combinations of buckets."""
    buckets = {v.arg[0]: len(buckets_of(v)) or 1 for call in schedule.calls for v in call.variables}
    if math.prod(buckets.values()) > MOST_LISTS:
        raise ScheduleError(f"the buckets of the variables {', '.join(sorted(buckets))} have {math.prod(buckets.values())} combinations; "
                            f"a plan may have {MOST_LISTS}: give fewer buckets")
    numbers: dict[UOp, int] = {}
    kernels: dict[str, Kernel] = {}
    called: dict[str, HostCall] = {}
    copies: dict[str, BufferCopy] = {}
    place = places.of_buffer if places is not None else (lambda node: "")
    levels = schedule.levels() if made_here else check_schedule(schedule)
    order = sorted(range(len(levels)), key=lambda i: (levels[i], i))
    outputs = set(schedule.outputs)
    written: set[UOp] = set()
    calls = []
    for i in order:
        call = schedule.calls[i]
        for a in call.args:
            numbers.setdefault(a, len(numbers))
        if calls_back(call.ast):
            made = host_call(call.ast, functions or {})
            key = f"callback {call.ast.key.hex()}"
            called[key] = made
            written.update(call.args[:made.stored_results])
            calls.append(Call(key, tuple(numbers[a] for a in call.args), call.name_hint, call.origin, call.why, levels[i],
                              call.offsets, tuple(VariableSpec(*v.arg[:4]) for v in call.variables), place(call.args[0])))
            continue
        if copies_to(call.ast):
            key = f"copy {call.ast.key.hex()}"
            copies[key] = BufferCopy(call.args[0].dtype, call.args[0].arg)
            written.add(call.args[0])
            calls.append(Call(key, tuple(numbers[a] for a in call.args), call.name_hint, call.origin, call.why, levels[i], call.offsets))
            continue
        for ast, variables in bucket_kernels(call.ast, call.variables):
            kernel = kernel_of(ast)
            kernels[kernel.key] = kernel
            written.update(call.args[s] for s in kernel.outs)
            calls.append(Call(kernel.key, tuple(numbers[a] for a in call.args), call.name_hint, call.origin, call.why, levels[i],
                              call.offsets, variables, place(call.args[0])))
    for u in schedule.outputs:
        numbers.setdefault(u, len(numbers))

    def kind(u: UOp) -> BufferKind:
        if u in outputs or (u in written and u.src[0].op is not Ops.LUNIQUE):
            return "output"
        if u.src[0].op is Ops.LUNIQUE:
            return "intermediate"
        return "constant" if u in constants else "input"
    specs = tuple(BufferSpec(u.dtype, u.arg, kind(u), place(u)) for u in numbers)
    outs = tuple(numbers[u] for u in schedule.outputs)
    return UnboundPlan(tuple(calls), specs, outs, kernels, called, copies), list(numbers), numbers


def bucket_kernels(ast: UOp, variables: Sequence[UOp]) -> list[tuple[UOp, tuple[VariableSpec, ...]]]:
    """Specialise a kernel's AST for each combination of the buckets of its variables (DEFINE_VARs of the graph); without buckets, the AST
    is returned as it is.

    Raises ScheduleError for more than `MOST_VARIANTS`."""
    buckets = [buckets_of(v) or (None,) for v in variables]
    if math.prod(map(len, buckets)) > MOST_VARIANTS:
        raise ScheduleError(f"the buckets of the variables {', '.join(v.arg[0] for v in variables)} would make "
                            f"{math.prod(map(len, buckets))} kernels of one; {MOST_VARIANTS} are allowed: give fewer buckets")
    kernels = []
    for choice in product(*buckets):
        bounds = {f"v{k}": b for k, b in enumerate(choice) if b is not None}
        kernels.append((in_bucket(ast, bounds) if bounds else ast,
                      tuple(VariableSpec(*v.arg[:4])._replace(bucket=b) for v, b in zip(variables, choice, strict=True))))
    return kernels


def kernel_of(ast: UOp) -> Kernel:
    """Return the analysed kernel of a canonical AST. Cached."""
    with _lock:
        kernel = _kernels.get(ast)
    if kernel is None:
        kernel = Kernel(ast)
        with _lock:
            if len(_kernels) >= 4096:
                _kernels.pop(next(iter(_kernels)))
            kernel = _kernels.setdefault(ast, kernel)
    return kernel


def buffers_under(nodes: Iterable[UOp]) -> set[UOp]:
    """Return the BUFFERs that graph nodes read."""
    return {u for n in nodes for u in n.toposort() if u.op is Ops.BUFFER}
