"""Kernels written by hand and called in a graph, and loops of such calls.

    k = CALL(x, y, BIND(i, r)) [AST]     the AST over memory x, which it writes, and y; its variable i is a RANGE
    e = END(k, r)                        for each value of r
    AFTER(x, e)                          the content of x after the loop

    BEGIN r; RUN k; END r                →   k with i = 0, k with i = 1, …

    p = CALL(x, BIND(i, r))              loops in a loop: for each value of r first p,
    k = CALL(y, AFTER(x, p), BIND(i, r), BIND(j, s))
    e = END(k, s)                        then k for each value of s,
    q = CALL(z, AFTER(y, e))             then q
    f = END(q, r)

    BEGIN r; RUN p; BEGIN s; RUN k; END s; RUN q; END r

A loop consists of an END and the RANGE that it closes. Its body has the calls and loops that are sources of the END, and the ones before
them that depend on the RANGE. Calls that depend on no RANGE of the loop, and are no source of its END, are outside and run once. Two loops
may share a RANGE if neither is inside the other. The outermost loops are small programs, which run once, when the graph is scheduled; the
result is a list of invocations with the values of their variables. Inside a loop an argument names memory: its content is the result of the
invocations before, possibly of those in the iteration before.
"""
from __future__ import annotations

from collections.abc import Container, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Literal, NamedTuple

from svod.core.graph.shapes import size_of
from svod.core.graph.storage import base_of, is_padding_view
from svod.core.ir import symbolic as sy
from svod.core.ir.launch import check_bounds, evaluate_extent
from svod.core.ir.uop import Ops, UOp
from svod.core.schedule.axes import merge_ranges
from svod.core.schedule.call_checks import check_accesses
from svod.core.schedule.canonical import canonicalize
from svod.core.schedule.levels import order_of
from svod.core.schedule.regions import narrow_params
from svod.core.schedule.thread_indices import launch_of, over_ranges, positions_of
from svod.errors import LaunchError, ScheduleError

MOST_INVOCATIONS = 1 << 14      # most invocations of one nest of loops, each of which is a launch of the plan

# operations between memory and the CALL that it is an argument of
_PASSES = frozenset({Ops.RESHAPE, Ops.DETACH, Ops.MSTACK, Ops.MSELECT})
_CALL_NAMES = ("BEGIN", "RUN", "END")


class ProgramStep(NamedTuple):
    """One step of a loop's program: BEGIN, RUN or END. A RUN has a `call`, a BEGIN a `range`, an END both."""

    kind: Literal["BEGIN", "RUN", "END"]
    call: UOp | None
    range: UOp | None


class Invocation(NamedTuple):
    """A CALL with the values of the variables that its AST reads."""

    call: UOp
    values: tuple[tuple[str, int], ...]


# -- calls ---------------------------------------------------------------------------------------------------------------
def memory_of(argument: UOp) -> UOp:
    """The memory that an argument of a CALL names. If it has parts on several devices, the selected part, or the first."""
    node = argument
    while node.op in (Ops.MSELECT, Ops.MSTACK):
        stack = node.src[0] if node.op is Ops.MSELECT else node
        if stack.op is not Ops.MSTACK or not stack.src or not 0 <= (part := node.arg if node.op is Ops.MSELECT else 0) < len(stack.src):
            raise ScheduleError(f"a multi-device argument must name the memory of one device: {node.op.value} of {stack.op.value} with "
                                f"{len(stack.src)} parts does not")
        node = stack.src[part]
    return base_of(node)


def arguments_of(call: UOp) -> tuple[UOp, ...]:
    """The arguments of a CALL by slot; RESHAPEs are dropped."""
    return tuple(memory_of(s) for s in call.src if s.op is not Ops.BIND)


def written_slots(call: UOp) -> tuple[int, ...]:
    """The slots that the AST of a CALL stores to."""
    return tuple(sorted({s.src[0].src[0].arg.slot for s in call.arg.src}))


def bindings_of(call: UOp) -> dict[str, int | UOp]:
    """Variable of a CALL → its value, or the RANGE that it is bound to. Raises ScheduleError if these contradict each other."""
    bindings: dict[str, int | UOp] = {}
    for bind in (s for s in call.src if s.op is Ops.BIND):
        var, given = bind.src
        if var.op is not Ops.DEFINE_VAR:
            raise ScheduleError(f"BIND of a CALL must wrap a DEFINE_VAR, found {var.op.value}")
        name, low, high = var.arg[:3]
        value = given if given.op is Ops.RANGE else _number(given, f"variable {name} of a CALL is bound to a number or to a loop's RANGE")
        if bindings.setdefault(name, value) != value:
            raise ScheduleError(f"bind mismatch on {name}, {_shown(bindings[name])} != {_shown(value)} (one CALL); rename one of them")
        for v in values_of(value):
            check_bounds(name, v, low, high, ScheduleError)
    return bindings


def values_of(value: int | UOp) -> tuple[int, int]:
    """The first and the last value that a variable takes."""
    return (value, value) if isinstance(value, int) else range_bounds(value)


def _shown(value: int | UOp) -> str:
    _, last = values_of(value)
    return str(value) if isinstance(value, int) else f"a RANGE of {last + 1}"


def _number(expr: UOp, what: str) -> int:
    """The value of a launch-size expression without free variables. Raises ScheduleError."""
    try:
        return evaluate_extent(expr, {})
    except LaunchError as error:
        raise ScheduleError(f"{what}: {error}") from error


def range_bounds(loop: UOp) -> tuple[int, int]:
    """First and last value of the RANGE of a loop. Raises ScheduleError."""
    if loop.op is not Ops.RANGE:
        raise ScheduleError(f"END closes a RANGE, found {loop.op.value}")
    turns = _number(loop.src[0], "the RANGE of a loop of calls must end at a concrete integer")
    if turns < 1:
        raise ScheduleError(f"invalid bounds of the RANGE of a loop of calls: first 0, last {turns - 1}")
    return 0, turns - 1


def check_call(call: UOp) -> None:
    """Raise ScheduleError if the AST and the arguments of a CALL do not fit each other."""
    _check_body(call.arg)
    _check_arguments(call.arg, arguments_of(call))
    _check_written(call)
    bound = bindings_of(call)
    ast = over_ranges(call.arg)
    variables = list(ast.walk(Ops.DEFINE_VAR))
    unbound = sorted({u.arg[0] for u in variables} - set(bound))
    if unbound:
        raise ScheduleError(f"the kernel of a CALL reads the variable {unbound[0]}, which has no BIND among its arguments")
    for end in (0, 1):      # the values between the first and the last are checked invocation by invocation
        _check_launch(call.arg, {name: values_of(value)[end] for name, value in bound.items()})
    narrowed = {var: var.replace(arg=(var.arg[0], *values_of(bound[var.arg[0]]))) for var in variables}
    check_accesses(ast.substitute(narrowed), ", ".join(sorted(bound)))


def _check_body(ast: object) -> None:
    """Raise ScheduleError for a body that is not a kernel, and for a kernel that accesses anything but its PARAMs."""
    if not isinstance(ast, UOp) or ast.op is not Ops.SINK or not ast.src or any(s.op is not Ops.STORE for s in ast.src):
        raise ScheduleError("the body of a CALL is a kernel: a SINK of STOREs, as in docs/ir.md, section 2")
    for u in ast.walk(Ops.LOAD, Ops.STORE):
        where = u.src[0].src[0] if u.src and u.src[0].op is Ops.INDEX else None
        if where is None or where.op is not Ops.PARAM:
            accessed = "no INDEX" if where is None else where.op.value
            raise ScheduleError(f"a kernel that is called has a {u.op.value} of {accessed}: it loads from and stores to its PARAMs; memory "
                                "of its own is a STAGE, sized by its RANGEs and its dtype")


def _check_arguments(ast: UOp, arguments: Sequence[UOp]) -> None:
    """Raise ScheduleError unless there is one argument per slot, of the slot's dtype and with at least its elements."""
    params = {u.arg.slot: u for u in ast.walk(Ops.PARAM)}
    if sorted(params) != list(range(len(arguments))):
        raise ScheduleError(f"a kernel with parameters at the slots {sorted(params)} is called with {len(arguments)} arguments; slots are "
                            "0, 1, … without gaps, one argument each")
    for slot, param in sorted(params.items()):
        given = arguments[slot]
        if param.dtype != given.dtype or param.arg.size > size_of(given):
            raise ScheduleError(f"slot {slot} of a kernel that is called takes {param.arg.size} elements of {param.dtype.name}; given are "
                                f"{size_of(given)} of {given.dtype.name}")


def _check_written(call: UOp) -> None:
    """Raise ScheduleError if the argument of a slot that is written is no memory, or is the memory of another slot as well."""
    arguments = arguments_of(call)
    for slot in written_slots(call):
        if arguments[slot].op not in (Ops.BUFFER, Ops.AFTER):
            raise ScheduleError(f"slot {slot} of a kernel that is called is written and must be memory, found {arguments[slot].op.value}: "
                                "realize the tensor first")
        if sum(_storage(a) is _storage(arguments[slot]) for a in arguments) > 1:
            raise ScheduleError(f"slot {slot} of a kernel that is called is written, and another slot is the same memory: use one slot for "
                                "both, or a copy")


def _storage(content: UOp) -> UOp:
    while content.op is Ops.AFTER:
        content = base_of(content.src[0])
    return content


def _check_launch(ast: UOp, values: Mapping[str, int]) -> None:
    """Raise ScheduleError if a kernel's launch has no positions for these values of its variables."""
    if positions_of(ast):
        try:
            launch_of(ast).at(values)
        except LaunchError as error:
            raise ScheduleError(f"a kernel that is called cannot be launched: {error}") from error


def kernel_of_call(ast: UOp, values: Sequence[tuple[str, int]],
                   known: dict[UOp, tuple[UOp, tuple[int, ...]]]) -> tuple[UOp, tuple[int, ...], tuple[int, ...]]:
    """(canonical AST with values for its variables; per slot of it, the slot of `ast`; per slot, the element at which the PARAM begins).
    Calls that differ only in these elements share one kernel. `known`: cache of the kernels."""
    given = dict(values)
    _check_launch(ast, given)
    over_positions, ast = bool(positions_of(ast)), over_ranges(ast)
    done: dict[UOp, UOp] = {}
    leaves: dict[UOp, UOp] = {}     # replacements for leaves of index expressions
    for u in ast.toposort():
        src = tuple([done[s] for s in u.src])
        if u.op is Ops.INDEX:
            src = (src[0], *(sy.simplify(e, leaves) for e in u.src[1:]))
        elif u.op is Ops.LOAD and len(u.src) == 3:
            src = (*src[:2], sy.simplify(u.src[2], leaves))
        elif u.op is Ops.RANGE:
            src = (sy.simplify(u.src[0], leaves), *src[1:])
        if u.op is Ops.DEFINE_VAR:
            done[u] = sy.const(given[u.arg[0]])
        elif u.op is Ops.PARAM:
            done[u] = u.replace(arg=replace(u.arg, constant=False))
        else:
            done[u] = u if src == u.src else u.replace(src=src)
        if u.op in (Ops.DEFINE_VAR, Ops.RANGE, Ops.CAST):
            leaves[u] = done[u]
    plain = merge_ranges(done[ast]) if over_positions else done[ast]
    narrowed, first = narrow_params(plain)
    if narrowed not in known:
        known[narrowed] = canonicalize(narrowed)
    canonical, slots = known[narrowed]
    return canonical, slots, tuple(first.get(s, 0) for s in slots)


# -- loops ---------------------------------------------------------------------------------------------------------------
class CallProgram(NamedTuple):
    """A call or a loop as steps. `after`: AFTERs outside of it that must come before it."""

    steps: tuple[ProgramStep, ...]
    after: tuple[UOp, ...]


def called_by(u: UOp) -> UOp:
    """The CALL, or the END of a loop, that a node stands for: an END that closes no RANGE stands for its source."""
    while u.op is Ops.END and len(u.src) == 1:
        u = u.src[0]
    return u


def call_under(after: UOp) -> UOp | None:
    """The CALL or loop whose result an AFTER names; None for an AFTER of ASSIGNs."""
    return next((called_by(d) for d in after.src[1:] if d.op in (Ops.CALL, Ops.END)), None)


def programs_of(sink: UOp) -> dict[UOp, CallProgram]:
    """The program of each CALL, and of each loop (named by its END), that is outside of all loops; in topological order.

    Raises ScheduleError for a loop that is not closed, or malformed."""
    order = sink.toposort(gate=lambda n: n.op is not Ops.BUFFER)
    if not any(u.op is Ops.CALL or u.op is Ops.END for u in order):
        return {}
    return _Nests(order).programs()


def open_ranges(order: Iterable[UOp]) -> dict[UOp, frozenset[UOp]]:
    """Node → the RANGEs that it depends on and that no END below it closes: the loops it is inside of. `order`: nodes, sources first."""
    none: frozenset[UOp] = frozenset()
    inside: dict[UOp, frozenset[UOp]] = {}
    for u in order:
        below = none.union(*(inside[s] for s in u.src)) if u.op is not Ops.BUFFER else none
        inside[u] = below | {u} if u.op is Ops.RANGE else below.difference(u.src[-1:]) if u.op is Ops.END else below
    return inside


class _Nests:
    """Finds the loops of a graph, and the calls and loops in each. A unit is a CALL, or an END that closes a RANGE."""

    def __init__(self, order: Sequence[UOp]):
        self.order = order
        self.units: list[UOp] = []                      # in topological order
        self.position: dict[UOp, int] = {}              # unit → its position in `units`
        self.inside = open_ranges(order)
        self.names: dict[UOp, frozenset[UOp]] = {}      # node → units whose results it names
        self.waits: dict[UOp, frozenset[UOp]] = {}      # unit → units outside it that it has to come after
        self.body: dict[UOp, list[UOp]] = {}            # END → units directly in the body of its loop
        self.loop_of: dict[UOp, UOp] = {}               # unit → END of the loop directly around it
        self.closed: dict[UOp, frozenset[UOp]] = {}     # unit → RANGEs closed by it and by loops inside it
        self.earlier: dict[UOp, list[UOp]] = {}         # unit → AFTERs that must come before it, without being its arguments
        # END → pairs of units of its body, the first of which comes before the second
        self.edges: dict[UOp, list[tuple[UOp, UOp]]] = {}
        for u in order:
            self.add(u)

    # -- which unit stands in which loop -------------------------------------------------------
    def add(self, u: UOp) -> None:
        """Process a node whose sources have been processed."""
        none: frozenset[UOp] = frozenset()
        self.names[u] = none
        if u.op is Ops.CALL:
            check_call(u)
            self.add_unit(u, none.union(*(self.names[s] for s in u.src)), none)
        elif u.op is Ops.END:
            self.close(u)
        elif u.op is Ops.AFTER and (called := call_under(u)) is not None:
            orders = [d for d in u.src[1:] if d.op is Ops.AFTER]
            self.earlier.setdefault(called, []).extend(orders)
            self.names[u] = frozenset({called}).union(*(self.names[d] for d in orders))
        elif u.op is not Ops.BUFFER and (u.op in _PASSES or is_padding_view(u) or self.inside[u]):
            self.names[u] = none.union(*(self.names[s] for s in u.src))

    def add_unit(self, u: UOp, waits: frozenset[UOp], closed: frozenset[UOp]) -> None:
        self.position[u] = len(self.units)
        self.units.append(u)
        self.waits[u], self.closed[u], self.names[u] = waits, closed, frozenset({u})

    def close(self, end: UOp) -> None:
        """Fill the body of an END's loop: the units that are its sources, and the units that these have to come after and that depend on
        the RANGE."""
        wrapped, loop = _wrapped(end)
        if loop is None:
            self.names[end] = self.names[wrapped[0]]
            return
        body = dict.fromkeys(wrapped)
        todo = list(body)
        for c in body:
            if c in self.loop_of:
                raise ScheduleError("a call stands in two loops of calls, and neither is inside the other: the loops cross; close the "
                                    "inner one first, END(END(call, inner), outer)")
        while todo:
            for c in self.waits[todo.pop()]:
                if loop in self.inside[c] and c not in body:
                    if c in self.loop_of:
                        raise _left_in_another_loop()
                    body[c] = None
                    todo.append(c)
        closed = frozenset({loop}).union(*(self.closed[c] for c in body))
        if any(loop in self.closed[c] for c in body):
            raise ScheduleError("END closes a RANGE that an END inside it has closed already: a loop inside another has a RANGE of its "
                                "own, told by its arg")
        self.body[end] = list(body)
        self.loop_of.update(dict.fromkeys(body, end))
        self.add_unit(end, frozenset().union(*(self.waits[c] for c in body)).difference(body), closed)

    def loops_around(self, u: UOp) -> list[UOp]:
        """A unit, and the loops around it, innermost first."""
        around = [u]
        while around[-1] in self.loop_of:
            around.append(self.loop_of[around[-1]])
        return around

    # -- the order of units, and checks --------------------------------------------------------
    def programs(self) -> dict[UOp, CallProgram]:
        """See `programs_of`."""
        self.check_reads()
        outside = self.order_units()
        steps: dict[UOp, tuple[ProgramStep, ...]] = {}
        for u in self.units:
            if u.op is Ops.CALL:
                steps[u] = (ProgramStep("RUN", u, None),)
                continue
            inner = [s for c in self.ordered_body(u) for s in steps.pop(c)]
            loop, last = u.src[-1], next(s.call for s in reversed(inner) if s.kind == "RUN")
            steps[u] = (ProgramStep("BEGIN", None, loop), *inner, ProgramStep("END", last, loop))
        return {u: CallProgram(s, tuple(dict.fromkeys(outside.get(u, ())))) for u, s in steps.items()}

    def check_reads(self) -> None:
        """Raise ScheduleError for a loop without END, and for a result of a call inside a loop that is read outside of the loop."""
        for u in self.units:
            if self.inside[u] and u not in self.loop_of:
                raise ScheduleError("a loop of calls is missing its END: a call depends on a RANGE that no END closes, or what is left "
                                    "inside the loop is read outside; read the AFTER of the END, which closes the RANGE; of a call_loop, "
                                    "what its calls leave is read after its `with`")
        for u in self.order:
            if u.op in (*_PASSES, Ops.BUFFER, Ops.CALL, Ops.END) or is_padding_view(u) or (u.op is Ops.AFTER and call_under(u) is not None):
                continue
            if any(c in self.loop_of for s in u.src for c in self.names[s]):
                by = "an output is" if u.op is Ops.SINK else f"a value is computed, by {u.op.value}, of"
                raise ScheduleError(f"{by} what a call leaves inside a loop of calls: compute it in a kernel that is called, or read the "
                                    "AFTER of the END, which closes the loop")

    def order_units(self) -> dict[UOp, list[UOp]]:
        """Record the order of the units in each loop. Returns, for each unit outside of all loops, the AFTERs that come before it."""
        outside: dict[UOp, list[UOp]] = {}
        for u in self.units:
            later = [c for a in self.earlier.get(u, ()) for c in self.names[a]]
            for c in (*(self.waits[u] if u.op is Ops.CALL else ()), *later):
                if self.loop_of.get(c) not in (None, *self.loops_around(u)):
                    raise _left_in_another_loop()
                self.put_before(c, u)
            for a in self.earlier.get(u, ()):
                head = self.loops_around(u)[-1]
                if all(self.loops_around(c)[-1] is not head for c in self.names[a]):
                    outside.setdefault(head, []).append(a)
        self.order_by_memory()
        return outside

    def order_by_memory(self) -> None:
        """Record that, in a loop, calls that read the content of a buffer come before the call that overwrites it."""
        overwritten: dict[tuple[UOp, UOp, UOp], UOp] = {}       # (outermost loop, buffer, node that left the buffer's content) → the call
        read: list[tuple[tuple[UOp, UOp, UOp], UOp]] = []
        for u in self.units:
            if u.op is Ops.CALL and u in self.loop_of:
                written = written_slots(u)
                for slot, a in enumerate(arguments_of(u)):
                    if a.op in (Ops.BUFFER, Ops.AFTER):
                        content = (self.loops_around(u)[-1], _storage(a), (call_under(a) or a) if a.op is Ops.AFTER else a)
                        if slot not in written:
                            read.append((content, u))
                        elif overwritten.setdefault(content, u) is not u:
                            raise ScheduleError("two calls of a loop start from the same content of a buffer of "
                                                f"{_storage(a).arg} {a.dtype.name}: write to what the first one leaves")
        for content, u in read:
            if overwritten.get(content, u) is not u:
                self.put_before(u, overwritten[content])

    def put_before(self, first: UOp, then: UOp) -> None:
        """Record that a unit comes before another, in the innermost loop that contains both."""
        before, after = self.loops_around(first), self.loops_around(then)
        while len(before) > 1 and len(after) > 1 and before[-1] is after[-1]:
            before.pop()
            after.pop()
        if before[-1] is after[-1]:
            raise _in_circles()
        if before[-1] in self.loop_of:
            self.edges.setdefault(self.loop_of[before[-1]], []).append((before[-1], after[-1]))

    def ordered_body(self, end: UOp) -> list[UOp]:
        """The units in the body of a loop in an order in which they can run; the graph's order where possible."""
        body = sorted(self.body[end], key=self.position.__getitem__)
        number = {u: i for i, u in enumerate(body)}
        deps: list[set[int]] = [set() for _ in body]
        for first, then in self.edges.get(end, ()):
            deps[number[then]].add(number[first])
        sequence = order_of(deps)
        if len(sequence) < len(body):
            raise _in_circles()
        return [body[i] for i in sequence]


def _wrapped(end: UOp) -> tuple[list[UOp], UOp | None]:
    """(units that are sources of an END, the RANGE that it closes or None)."""
    wrapped = [called_by(s) for s in end.src if s.op is Ops.CALL or s.op is Ops.END]
    closes = [s for s in end.src if s.op is not Ops.CALL and s.op is not Ops.END]
    if not wrapped:
        raise ScheduleError(f"END must wrap a CALL, found {closes[0].op.value if closes else 'nothing'}")
    if len(closes) > 1:
        raise ScheduleError(f"END of a CALL must close at most one RANGE, found {len(closes)}; a nest has an END for each, "
                            "END(END(call, inner), outer)")
    if not closes:
        if len(wrapped) > 1:
            raise ScheduleError(f"END of {len(wrapped)} CALLs closes no RANGE: without one it is of one CALL")
        return wrapped, None
    range_bounds(closes[0])
    return wrapped, closes[0]


def _left_in_another_loop() -> ScheduleError:
    return ScheduleError("a call reads what is left inside another loop of calls: read the AFTER of the END, which closes that loop, or "
                         "put the call into it")


def _in_circles() -> ScheduleError:
    return ScheduleError("calls of a loop wait for each other in a circle: each overwrites what another one has still to read, or is to "
                         "come after it; let one read what the other leaves, or a copy from before the loop")


def unroll(program: Sequence[ProgramStep]) -> tuple[Invocation, ...]:
    """The invocations of a program, in order.

    Raises ScheduleError for a step without its call or RANGE, a RANGE without END, an END without BEGIN, loops that cross, a call whose
    variable is bound to a RANGE outside of its loop, and for too many invocations."""
    _check_steps(program)
    calls = {s.call: bindings_of(s.call) for s in program if s.kind == "RUN" and s.call is not None}
    _check_loops(program, calls)
    reads: dict[UOp, list[tuple[str, int | UOp]]] = {}
    for call, bound in calls.items():
        used = {u.arg[0] for u in call.arg.walk(Ops.DEFINE_VAR)}
        reads[call] = [(name, value) for name, value in sorted(bound.items()) if name in used]
    count: dict[UOp, int] = {}      # active RANGE → its value
    begun: dict[UOp, int] = {}      # active RANGE → index of the step after its BEGIN
    out: list[Invocation] = []
    at = 0
    while at < len(program):
        kind, step, loop = program[at]
        at += 1
        if kind == "RUN" and step is not None:
            out.append(Invocation(step, tuple([(name, value if isinstance(value, int) else count[value]) for name, value in reads[step]])))
        elif kind == "BEGIN" and loop is not None:
            (count[loop], _), begun[loop] = range_bounds(loop), at
        elif loop is not None and count[loop] < range_bounds(loop)[1]:
            count[loop] += 1
            at = begun[loop]
    return tuple(out)


def _check_steps(program: Sequence[ProgramStep]) -> None:
    """Raise ScheduleError for a step of an unknown kind, or without the call or the RANGE that its kind needs."""
    for n, (kind, call, loop) in enumerate(program):
        if kind not in _CALL_NAMES or (kind != "BEGIN" and (call is None or call.op is not Ops.CALL)) or (kind != "RUN" and loop is None):
            unknown = "CALL" if kind == "RUN" else "CALL or RANGE"
            raise ScheduleError(f"step {n} of a loop of calls, {kind}, references an unknown {unknown}: a BEGIN names a RANGE, a RUN a "
                                "CALL, an END both")


def _check_loops(program: Sequence[ProgramStep], calls: Mapping[UOp, Mapping[str, int | UOp]]) -> None:
    """Raise ScheduleError for loops that are neither nested nor one after the other, for a call whose variable is bound to a RANGE outside
    of its loop, and for too many invocations."""
    known = {s.range for s in program if s.kind == "BEGIN"}
    active: list[UOp] = []
    repeats, invocations, turns = [1], 0, 0       # `repeats`: iterations of all active loops together, one entry per active loop
    for kind, call, loop in program:
        if kind == "BEGIN" and loop is not None:
            if loop in active:
                raise ScheduleError("a RANGE begins that is active already: a loop inside another has a RANGE of its own")
            active.append(loop)
            repeats.append(repeats[-1] * (range_bounds(loop)[1] + 1))
        elif kind == "RUN" and call is not None:
            _check_active(calls[call], known, active)
            invocations += repeats[-1]
        else:
            if call not in calls:
                raise ScheduleError("END of a loop is of a CALL that is unknown: it is not one of the loop's")
            if loop not in active:
                raise ScheduleError("END closes a RANGE that is not active: its BEGIN does not stand before it, or it is closed already")
            if loop is not active.pop():
                raise ScheduleError("END closes a RANGE while one that begins inside it is active: the loops cross")
            turns = max(turns, repeats.pop())
    if active:
        raise ScheduleError("the RANGE of a loop of calls is missing END")
    if max(invocations, turns) > MOST_INVOCATIONS:
        raise ScheduleError(f"a loop of calls comes to more than {MOST_INVOCATIONS} invocations or turns, {max(invocations, turns)}: each "
                            "is a launch of the plan; loop inside the kernel")


def _check_active(bound: Mapping[str, int | UOp], known: Container[UOp | None], active: Container[UOp]) -> None:
    """Raise ScheduleError for a variable that is bound to a RANGE outside of its loop."""
    for name, value in bound.items():
        if not isinstance(value, int) and value not in active:
            raise ScheduleError(f"variable {name} of a CALL is a RANGE that is " + (
                "not active: the call stands outside its loop" if value in known else "missing from the loop: no END closes it"))
