"""Kernels written by hand and called in a graph, and loops of such calls.

    k = CALL(x, y, BIND(i, r)) [AST]     the AST over memory x, which it writes, and y; its variable i is a RANGE
    e = END(k, r)                        for each value of r
    AFTER(x, e)                          what is in x then

    BEGIN r; RUN k; END r                →   k with i = 0, k with i = 1, …

A loop is found by structure: a RANGE that an END closes, and the calls in between, which depend on the RANGE, or are the one that the END
is of; other loops may have the same RANGE. Its steps are a small program, run once when the graph is scheduled: what is left is a list of
invocations, each with the values that its variables have then. Inside a loop arguments name memory: they are what the invocations before
left there.
"""
from __future__ import annotations

from collections.abc import Container, Mapping, Sequence
from dataclasses import replace
from typing import Literal, NamedTuple

from svod.core.graph.graph import base_of, size_of
from svod.core.ir import symbolic as sy
from svod.core.ir.launch import check_bounds, evaluate_extent
from svod.core.ir.uop import Ops, UOp
from svod.core.schedule.axes import merge_ranges
from svod.core.schedule.call_checks import check_accesses
from svod.core.schedule.canonical import canonicalize
from svod.core.schedule.regions import narrow_params
from svod.core.schedule.thread_indices import launch_of, over_ranges, positions_of
from svod.errors import LaunchError, ScheduleError

MOST_INVOCATIONS = 1 << 14      # of one loop: each is a launch of the plan

_IN_LOOPS = frozenset({Ops.AFTER, Ops.BIND, Ops.SINK, Ops.RESHAPE, Ops.DETACH, Ops.MSTACK, Ops.MSELECT})      # besides CALL, END and RANGE


_NAMES = ("BEGIN", "RUN", "END")


class Step(NamedTuple):
    """One step of a loop's program: `range` is None for a RUN, `call` for a BEGIN; an END has both."""

    kind: Literal["BEGIN", "RUN", "END"]
    call: UOp | None
    range: UOp | None


class Invocation(NamedTuple):
    """A CALL and the values of the variables that its AST reads."""

    call: UOp
    values: tuple[tuple[str, int], ...]


# -- calls ---------------------------------------------------------------------------------------------------------------
def memory_of(argument: UOp) -> UOp:
    """What an argument of a CALL names: of several devices' memory the part that is selected, else the first."""
    node = argument
    while node.op in (Ops.MSELECT, Ops.MSTACK):
        stack = node.src[0] if node.op is Ops.MSELECT else node
        if stack.op is not Ops.MSTACK or not stack.src or not 0 <= (part := node.arg if node.op is Ops.MSELECT else 0) < len(stack.src):
            raise ScheduleError(f"a multi-device argument must name the memory of one device: {node.op.value} of {stack.op.value} with "
                                f"{len(stack.src)} parts does not")
        node = stack.src[part]
    return base_of(node)


def arguments_of(call: UOp) -> tuple[UOp, ...]:
    """By slot what a CALL is applied to, without RESHAPEs."""
    return tuple(memory_of(s) for s in call.src if s.op is not Ops.BIND)


def written_slots(call: UOp) -> tuple[int, ...]:
    """The slots that the AST of a CALL stores to."""
    return tuple(sorted({s.src[0].src[0].arg.slot for s in call.arg.src}))


def bindings_of(call: UOp) -> dict[str, int | UOp]:
    """The value of each variable of a CALL, or the RANGE that counts it. Raises ScheduleError."""
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
    """The first and the last value of a variable."""
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
    """Raise ScheduleError for a CALL whose AST and arguments do not fit."""
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
    """Raise ScheduleError for a slot that is written and whose argument is not memory, or is the memory of another slot as well."""
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
    """Raise ScheduleError for positions of a launch that there are none of."""
    if positions_of(ast):
        try:
            launch_of(ast).at(values)
        except LaunchError as error:
            raise ScheduleError(f"a kernel that is called cannot be launched: {error}") from error


def kernel_of_call(ast: UOp, values: Sequence[tuple[str, int]],
                   known: dict[UOp, tuple[UOp, tuple[int, ...]]]) -> tuple[UOp, tuple[int, ...], tuple[int, ...]]:
    """The canonical AST with its variables given; by slot of it the slot of `ast`, and with which element of that the PARAM begins. What
    differs only in where it begins is one kernel, and found in `known`."""
    given = dict(values)
    _check_launch(ast, given)
    over_positions, ast = bool(positions_of(ast)), over_ranges(ast)
    done: dict[UOp, UOp] = {}
    leaves: dict[UOp, UOp] = {}     # of index expressions
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
def programs_of(sink: UOp) -> dict[UOp, tuple[Step, ...]]:
    """The program of each CALL that stands alone, by the CALL, and of each loop, by its END; in topological order.

    Raises ScheduleError for a loop that is not closed, or not well."""
    order = sink.toposort(gate=lambda n: n.op is not Ops.BUFFER)
    if not any(u.op is Ops.CALL or u.op is Ops.END for u in order):
        return {}
    inside: dict[UOp, frozenset[UOp]] = {}      # node → the RANGEs that it depends on and that are not closed below it
    members: dict[UOp, list[UOp]] = {}          # RANGE → calls that depend on it and are in no loop yet
    programs: dict[UOp, tuple[Step, ...]] = {}
    for u in order:
        inside[u] = frozenset[UOp]().union(*(inside[s] for s in u.src)) if u.op is not Ops.BUFFER else frozenset()
        if u.op is Ops.RANGE:
            inside[u] |= {u}
        elif u.op is Ops.CALL:
            check_call(u)
            if len(inside[u]) > 1:
                raise ScheduleError("a CALL stands in two loops at once; loops of calls are not nested: count through both with one RANGE")
            for r in inside[u]:
                members.setdefault(r, []).append(u)
            programs[u] = (Step("RUN", u, None),)
        elif u.op is Ops.END:
            loop = _closed_range(u)
            if loop is None:
                programs[u] = programs.pop(u.src[0])
                continue
            needed = set(u.toposort(gate=lambda n: n.op is not Ops.BUFFER))
            mine = members.setdefault(loop, [])
            body = [c for c in dict.fromkeys((*mine, u.src[0])) if c in needed]
            members[loop] = [c for c in mine if c not in needed]
            for c in body:
                programs.pop(c, None)
                _check_turns(c, body, inside)
            programs[u] = (Step("BEGIN", None, loop), *(Step("RUN", c, None) for c in body), Step("END", body[-1], loop))
            inside[u] -= {loop}
        elif inside[u] and u.op not in _IN_LOOPS:
            raise ScheduleError(f"a value is computed in a loop of calls, by {u.op.value}, of what a call leaves there: compute it in a "
                                "kernel that is called, or read the AFTER of the END")
    _check_all_closed(sink, order, inside, programs)
    return programs


def _check_all_closed(sink: UOp, order: Sequence[UOp], inside: Mapping[UOp, frozenset[UOp]],
                      programs: Mapping[UOp, Sequence[Step]]) -> None:
    """Raise ScheduleError for a loop without END, and for a value that is left inside a loop and read outside."""
    looped = {step.call for c, steps in programs.items() if c.op is Ops.END for step in steps}
    for u in order:
        if (u.op is Ops.CALL and u in programs and inside[u]) or (u.op is Ops.AFTER and not inside[u] and not looped.isdisjoint(u.src[1:])):
            raise ScheduleError("a loop of calls is missing its END, or what is left inside the loop is read outside: read the AFTER of "
                                "the END, which closes the RANGE")
    if inside[sink]:
        raise ScheduleError("a loop of calls is missing its END: an output depends on its RANGE; read the AFTER of the END")


def _check_turns(call: UOp, body: Sequence[UOp], inside: Mapping[UOp, frozenset[UOp]]) -> None:
    """What a call of a loop reads of a loop, it reads of its own."""
    for a in arguments_of(call):
        if a.op is Ops.AFTER and inside[a] and all(d not in body for d in a.src[1:] if d.op is Ops.CALL):
            raise ScheduleError("a loop of calls reads what is left inside another loop: read the AFTER of its END")


def _closed_range(end: UOp) -> UOp | None:
    """The RANGE that an END closes; None for an END that closes none."""
    if end.src[0].op is not Ops.CALL:
        raise ScheduleError(f"END must wrap a CALL, found {end.src[0].op.value}")
    if len(end.src) > 2:
        raise ScheduleError(f"END of a CALL must close at most one RANGE, found {len(end.src) - 1}")
    return end.src[1] if len(end.src) == 2 else None


def unroll(program: Sequence[Step]) -> tuple[Invocation, ...]:
    """The invocations that a program comes to, in order.

    Raises ScheduleError for a step that names no call or no RANGE, a RANGE without END, an END of what is not in the program or not begun,
    a call whose variable is a RANGE that is not begun, and for too many invocations."""
    _check_steps(program)
    calls = {s.call: bindings_of(s.call) for s in program if s.kind == "RUN" and s.call is not None}
    _check_loops(program, calls)
    used = {c: {u.arg[0] for u in c.arg.walk(Ops.DEFINE_VAR)} for c in calls}
    count: dict[UOp, int] = {}      # RANGE that is begun → its value
    after: dict[UOp, int] = {}      # RANGE that is begun → the index of the step behind its BEGIN
    out: list[Invocation] = []
    at = taken = 0
    while at < len(program):
        kind, call, loop = program[at]
        at, taken = at + 1, taken + 1
        if len(out) > MOST_INVOCATIONS or taken > (MOST_INVOCATIONS + 1) * len(program):
            raise ScheduleError(f"a loop of calls comes to more than {MOST_INVOCATIONS} invocations or turns; loop inside the kernel")
        if kind == "BEGIN" and loop is not None:
            (count[loop], _), after[loop] = range_bounds(loop), at
        elif kind == "RUN" and call is not None:
            out.append(Invocation(call, _values(calls[call], used[call], count)))
        elif loop is not None:
            if call not in calls:
                raise ScheduleError("END of a loop is of a CALL that is unknown: it is not one of the loop's")
            if loop not in count:
                raise ScheduleError("END closes a RANGE that is not active: its BEGIN does not stand before it")
            _, last = range_bounds(loop)
            if count[loop] < last:
                count[loop] += 1
                at = after[loop]
            else:
                del count[loop]
    return tuple(out)


def _check_steps(program: Sequence[Step]) -> None:
    """Raise ScheduleError for a step of an unknown kind, or without the call or the RANGE that its kind has."""
    for n, (kind, call, loop) in enumerate(program):
        if kind not in _NAMES or (kind != "BEGIN" and (call is None or call.op is not Ops.CALL)) or (kind != "RUN" and loop is None):
            unknown = "CALL" if kind == "RUN" else "CALL or RANGE"
            raise ScheduleError(f"step {n} of a loop of calls, {kind}, references an unknown {unknown}: a BEGIN names a RANGE, a RUN a "
                                "CALL, an END both")


def _check_loops(program: Sequence[Step], calls: Mapping[UOp, Mapping[str, int | UOp]]) -> None:
    """Raise ScheduleError for a RANGE that begins and has no END, and for a call whose variable is a RANGE that the program lacks."""
    begun = {s.range for s in program if s.kind == "BEGIN"}
    ended = {s.range for s in program if s.kind == "END"}
    if not begun <= ended:
        raise ScheduleError("the RANGE of a loop of calls is missing END")
    for bound in calls.values():
        for name, value in bound.items():
            if not isinstance(value, int) and value not in begun:
                raise ScheduleError(f"variable {name} of a CALL is a RANGE that is missing from the loop: no END closes it")


def _values(bound: Mapping[str, int | UOp], used: Container[str], count: Mapping[UOp, int]) -> tuple[tuple[str, int], ...]:
    """The values of those variables that are used."""
    out = []
    for name, value in sorted(bound.items()):
        if not isinstance(value, int) and value not in count:
            raise ScheduleError(f"variable {name} of a CALL is a RANGE that is not active: the call stands outside its loop")
        if name in used:
            out.append((name, value if isinstance(value, int) else count[value]))
    return tuple(out)
