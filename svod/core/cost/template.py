"""Templates: families of chains of opts, described as data and enumerated by one interpreter.

    COLUMNS, ROWS = Hole("columns", lambda p: (32, 16)), Hole("rows", lambda p: (6, 4))
    TOY = Template("TOY", COLUMNS, Apply("UPCAST", "o1", COLUMNS), ROWS, Apply("UPCAST", "o0", ROWS), Maybe(Apply("UNROLL", "r0", 2)))

    UPCAST(o1, 32) UPCAST(o0, 6)                      TOY: columns 32, rows 6
    UPCAST(o1, 32) UPCAST(o0, 6) UNROLL(r0, 2)        the same
    UPCAST(o1, 32) UPCAST(o0, 4)                      TOY: columns 32, rows 4
    …                                                 `made_by` gives the names of the states on the right

Steps are taken in order, depth first: each continues from every point that the steps before it have reached. A hole as a step continues
with each of its values in turn; as an argument it stands for its current value. A hole without values ends its branch, so facts of a kernel
are holes too."""
from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Generic, NamedTuple, TypeAlias, TypeVar

from svod.core.cost.sketch_facts import extent_of, name_of, resolved, try_opt
from svod.core.kernel.kernel import ResolvedStage
from svod.core.kernel.placement import vector_width
from svod.core.kernel.scheduler import Derived, Scheduler

T = TypeVar("T")
T_co = TypeVar("T_co", covariant=True)
_SPLITS = ("UPCAST", "UNROLL", "LOCAL", "GROUP", "TILE", "SPLITK")      # opts by an amount; an amount of 1 would change nothing


@dataclass(frozen=True, eq=False)
class Point:
    """A state reached within a template, with the stage whose loops are scheduled and the values of the holes so far."""

    state: Scheduler
    stage: ResolvedStage
    template: str = ""
    values: Mapping[Hole[Any], Any] = field(default_factory=dict)
    before: str = ""                # the text of `made_by` for the state that the template began with
    is_bounded: bool = False        # the caller drops a state at the best price so far: steps that only thin out states price none

    def __getitem__(self, hole: Hole[T]) -> T:
        value: T = self.values[hole]
        return value

    def bind(self, hole: Hole[T], value: T) -> Point:
        return Point(self.state, self.stage, self.template, {**self.values, hole: value}, self.before, self.is_bounded)

    def at(self, state: Scheduler) -> Point:
        """The same point with another state. If an opt has rewritten the kernel, the stage becomes that of the new output."""
        if state is self.state:
            return self
        stage = self.stage if state.kernel is self.state.kernel else resolved(state, state.kernel.output)
        return Point(state, stage, self.template, self.values, self.before, self.is_bounded)

    def get(self, value: Value[T]) -> T:
        """Evaluate an argument of a step: the value of a hole, the result of a function of the point, or a constant."""
        result: T = self[value] if isinstance(value, Hole) else value(self) if callable(value) else value
        return result

    def name(self, axis: int | str) -> str:
        """The name of a local axis of the stage; "" for -1; a name is returned unchanged."""
        return axis if isinstance(axis, str) else "" if axis < 0 else name_of(self.state, self.stage, axis)

    @property
    def width(self) -> int:
        """Elements of a vector of the stage."""
        return vector_width(self.state, self.stage)

    @property
    def outs(self) -> range:
        """The local axes of the stage's output; reduce axes follow."""
        return range(len(self.stage.stage.outs))

    @property
    def reds(self) -> range:
        """The local reduce axes of the stage."""
        return range(len(self.stage.stage.outs), len(self.stage.axes))

    def extent(self, axis: int) -> int:
        """Positions of a local axis of the stage."""
        return extent_of(self.state, self.stage, axis)

    def left(self, axis: int | str) -> int:
        """Iterations that the opts so far have left in the loop with the name of an axis."""
        return self.state.rows[self.state.row_id(self.name(axis))].extent

    def __str__(self) -> str:
        """The template, and the values of its named holes: "CONTRACTION: lanes 16, rows 6"."""
        shown = ", ".join(f"{hole.name} {value}" for hole, value in self.values.items() if hole.name)
        return "; ".join(x for x in (self.before, f"{self.template}: {shown}" if shown else self.template) if x)


@dataclass(frozen=True, eq=False)
class Hole(Generic[T_co]):
    """A choice between values, which are tried in order. `made_by` shows the values of holes that have a name."""

    name: str
    choices: Callable[[Point], Iterable[T_co]]


Value: TypeAlias = T | Hole[T] | Callable[[Point], T]


def inner(axis: Value[int]) -> Callable[[Point], str]:
    """Returns a function for the name of the inner part of a local axis that was split once."""
    return lambda p: f"{p.name(p.get(axis))}.in"


def fact(of: Callable[[Point], T | None]) -> Hole[T]:
    """A hole with a single value, computed once at its place among the steps, such as a property of the kernel. If `of` returns None,
    the branch ends."""
    return Hole("", lambda p: () if (value := of(p)) is None else (value,))


class Step:
    """A step of a template. Holes are steps too, but not of this class."""


Steps: TypeAlias = Step | Hole[Any] | Sequence[Any]


@dataclass(frozen=True, eq=False)
class Apply(Step):
    """Applies an opt to the axis with a name, or to a local axis of the stage (-1: to none). If the opt does not apply, the state stays
    unchanged, or, with `must`, the branch ends."""

    op: str
    axis: Value[Any]
    arg: Value[Any] = None
    must: bool = False

    def change(self, p: Point) -> Scheduler | None:
        axis, arg = p.name(p.get(self.axis)), p.get(self.arg)
        if axis == "" or (arg == 1 and self.op in _SPLITS):
            return p.state
        after = try_opt(p.state, self.op, axis, arg)
        return None if self.must and after is p.state else after


@dataclass(frozen=True, eq=False)
class Do(Step):
    """Applies opts by a function, for amounts that depend on each other. If it returns None, the branch ends."""

    change: Callable[[Point], Scheduler | None]


@dataclass(frozen=True, eq=False)
class Only(Step):
    """Ends the branch if a condition does not hold."""

    holds: Callable[[Point], bool]


@dataclass(frozen=True, eq=False)
class Cheaper(Step):
    """Prunes branches: a point ends its branch if an earlier point at this step, in the same template, was as cheap or cheaper, unless
    `kept` holds for it, or the point is bounded."""

    cost: Callable[[Point], float]
    kept: Callable[[Point], bool]


class _Group(Step):
    """Base of steps that consist of other steps. A sequence of steps is such a step too."""

    def __init__(self, *steps: Steps) -> None:
        self.steps = steps


class Choose(_Group):
    """Takes each of the alternatives by itself, in order."""


class Need(_Group):
    """Takes the steps, and ends the branch if they do not change the state."""


def Maybe(*steps: Steps) -> Choose:
    """Continues first without the steps, then with them if they change the state."""
    return Choose([], Need(*steps))


def Prefer(*steps: Steps) -> Choose:
    """Continues first with the steps if they change the state, then without them."""
    return Choose(Need(*steps), [])


class Each(_Group):
    """Takes the steps for each value of a hole, one after the other, on the same state."""

    def __init__(self, hole: Hole[Any], *steps: Steps) -> None:
        super().__init__(*steps)
        self.hole = hole


@dataclass(frozen=True, eq=False)
class _Bind(Step):
    """Sets a hole to one value."""

    hole: Hole[Any]
    value: Any


@dataclass(frozen=True, eq=False)
class _Changed(Step):
    """Ends the branch if its state is still the one before."""

    before: Scheduler


class Template(_Group):
    """Steps with a name, which `made_by` shows for the states that they produce."""

    def __init__(self, name: str, *steps: Steps) -> None:
        super().__init__(*steps)
        self.name = name


def schedule(steps: Steps, state: Scheduler, s: int | None = None, is_bounded: bool = False) -> Iterator[Scheduler]:
    """The states that templates produce, in order. They schedule the loops of stage `s`; None: the loops of the output stage.
    `is_bounded`: as in `Point`; more states come out."""
    start = Point(state, resolved(state, state.kernel.output if s is None else s), before=made_by(state), is_bounded=is_bounded)
    for p in _reached(steps, start):
        if p.state is not state and not made_by(p.state):
            _MADE_BY.give(p.state, str(p))
        yield p.state


class _Then(NamedTuple):
    """The steps that follow a step. `least`: as in `_reached`, for the template that `step` stands in."""

    step: Steps
    least: dict[Cheaper, float]
    then: _Then | None


def _reached(steps: Steps, start: Point) -> Iterator[Point]:
    """The points that steps reach from a point, depth first. Each template has the least cost seen so far at each of its `Cheaper`
    steps (`least`)."""
    todo: list[tuple[Steps, Point, _Then | None, dict[Cheaper, float]]] = [(steps, start, None, {})]       # the next one is the last
    while todo:
        step, p, then, least = todo.pop()
        match step:
            case Choose():
                todo += [(branch, p, then, least) for branch in reversed(step.steps)]
            case Need():
                todo.append((step.steps, p, _Then(_Changed(p.state), least, then), least))
            case Each():
                values = [_Bind(step.hole, value) for value in step.hole.choices(p)]
                todo.append(([[value, step.steps] for value in values], p, then, least))
            case Template():
                todo.append((step.steps, replace(p, template=step.name), then, {}))
            case [first, *rest]:
                for following in reversed(rest):
                    then = _Then(following, least, then)
                todo.append((first, p, then, least))
            case _ if then is None:
                yield from _points(step, p, least)
            case _:
                todo += [(then.step, q, then.then, then.least) for q in reversed(_points(step, p, least))]


def _points(step: Steps, p: Point, least: dict[Cheaper, float]) -> Sequence[Point]:
    """The points that a step without others in it reaches from point `p`. `least`: as in `_reached`."""
    match step:
        case Hole():
            return [p.bind(step, value) for value in step.choices(p)]
        case Apply() | Do():
            after = step.change(p)
            return () if after is None else (p.at(after),)
        case Only():
            return (p,) if step.holds(p) else ()
        case Cheaper() if p.is_bounded:
            return (p,)
        case Cheaper():
            cost, seen = step.cost(p), least.get(step, float("inf"))
            least[step] = min(cost, seen)
            return (p,) if cost < seen or step.kept(p) else ()
        case _Bind():
            return (p.bind(step.hole, step.value),)
        case _Changed():
            return () if p.state is step.before else (p,)
        case _:
            return (p,)     # no steps


_MADE_BY: Derived[str] = Derived(lambda state: "")


def made_by(state: Scheduler) -> str:
    """The template that produced a state, with the values of its holes; "" for other states, also after a further opt."""
    return _MADE_BY.known(state) or ""
