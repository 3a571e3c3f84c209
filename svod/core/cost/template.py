"""Templates: families of chains as data, enumerated by one interpreter.

    COLUMNS, ROWS = Hole("columns", lambda p: (32, 16)), Hole("rows", lambda p: (6, 4))
    TOY = Template("TOY", COLUMNS, Apply("UPCAST", "o1", COLUMNS), ROWS, Apply("UPCAST", "o0", ROWS), Maybe(Apply("UNROLL", "r0", 2)))

    UPCAST(o1, 32) UPCAST(o0, 6)                      TOY: columns 32, rows 6
    UPCAST(o1, 32) UPCAST(o0, 6) UNROLL(r0, 2)        the same
    UPCAST(o1, 32) UPCAST(o0, 4)                      TOY: columns 32, rows 4
    …                                                 `made_by` gives the names of the states on the right

Steps are taken in order, each from every point that the steps before it lead to, depth first. A hole as a step goes on with each of its
values; as an amount it is the value that it has there. A hole without values ends its branch, so facts of a kernel are holes too."""
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
_SPLITS = ("UPCAST", "UNROLL", "LOCAL", "GROUP", "TILE", "SPLITK")      # opts by an amount, of which 1 changes nothing


@dataclass(frozen=True, eq=False)
class Point:
    """A state on the way through a template: the stage whose loops are scheduled, and the values of the holes so far."""

    state: Scheduler
    stage: ResolvedStage
    template: str = ""
    values: Mapping[Hole[Any], Any] = field(default_factory=dict)
    before: str = ""                # how the state was made that the template began with

    def __getitem__(self, hole: Hole[T]) -> T:
        value: T = self.values[hole]
        return value

    def bind(self, hole: Hole[T], value: T) -> Point:
        return replace(self, values={**self.values, hole: value})

    def at(self, state: Scheduler) -> Point:
        """The point in another state. An opt that rewrites the kernel goes on with the stage of its output."""
        if state is self.state:
            return self
        stage = self.stage if state.kernel is self.state.kernel else resolved(state, state.kernel.output)
        return replace(self, state=state, stage=stage)

    def get(self, value: Value[T]) -> T:
        """A value as steps take it: a hole's, a function's of the point, or itself."""
        result: T = self[value] if isinstance(value, Hole) else value(self) if callable(value) else value
        return result

    def name(self, axis: int | str) -> str:
        """The name of a local axis of the stage, "" for -1; names stay as they are."""
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
        """Iterations left of the loop that has the name of an axis."""
        return self.state.rows[self.state.row_id(self.name(axis))].extent

    def __str__(self) -> str:
        """The template, and the values of its named holes: "CONTRACTION: lanes 16, rows 6"."""
        shown = ", ".join(f"{hole.name} {value}" for hole, value in self.values.items() if hole.name)
        return "; ".join(x for x in (self.before, f"{self.template}: {shown}" if shown else self.template) if x)


@dataclass(frozen=True, eq=False)
class Hole(Generic[T_co]):
    """A choice: its values at a point, in the order in which they are tried. `made_by` tells those of a hole that has a name."""

    name: str
    choices: Callable[[Point], Iterable[T_co]]


Value: TypeAlias = T | Hole[T] | Callable[[Point], T]


def inner(axis: Value[int]) -> Callable[[Point], str]:
    """The name of the inner part of a local axis that was split once."""
    return lambda p: f"{p.name(p.get(axis))}.in"


def fact(of: Callable[[Point], T | None]) -> Hole[T]:
    """What a template reads from a kernel, computed once where it stands among the steps; None ends the branch."""
    return Hole("", lambda p: () if (value := of(p)) is None else (value,))


class Step:
    """A step of a template, other than a hole."""


Steps: TypeAlias = Step | Hole[Any] | Sequence[Any]


@dataclass(frozen=True, eq=False)
class Apply(Step):
    """An opt of the axis with this name, or of a local axis of the stage (-1: none). The state stays where it does not apply; with `must`
    the branch ends there."""

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
    """Opts that a function applies, where amounts follow one from the other. None ends the branch."""

    change: Callable[[Point], Scheduler | None]


@dataclass(frozen=True, eq=False)
class Only(Step):
    """Ends the branch where a condition does not hold."""

    holds: Callable[[Point], bool]


@dataclass(frozen=True, eq=False)
class Cheaper(Step):
    """Prunes by a bound: a point that costs no less than one that came here before, in the same template, ends its branch unless it is to
    be kept."""

    cost: Callable[[Point], float]
    kept: Callable[[Point], bool]


class _Group(Step):
    """Steps that belong together; a sequence of steps is one of them."""

    def __init__(self, *steps: Steps) -> None:
        self.steps = steps


class Choose(_Group):
    """Each of the steps by itself, in this order."""


class Need(_Group):
    """The steps, where they change the state; else the branch ends."""


def Maybe(*steps: Steps) -> Choose:
    """Without the steps, and then with them where they change the state."""
    return Choose([], Need(*steps))


def Prefer(*steps: Steps) -> Choose:
    """With the steps where they change the state, and then without."""
    return Choose(Need(*steps), [])


class Each(_Group):
    """The steps for each value of a hole, one after the other."""

    def __init__(self, hole: Hole[Any], *steps: Steps) -> None:
        super().__init__(*steps)
        self.hole = hole


class _Bind(NamedTuple):
    """One value of a hole."""

    hole: Hole[Any]
    value: Any


class Template(_Group):
    """Steps with a name, by which `made_by` tells the states that they lead to."""

    def __init__(self, name: str, *steps: Steps) -> None:
        super().__init__(*steps)
        self.name = name


def schedule(steps: Steps, state: Scheduler, s: int | None = None) -> Iterator[Scheduler]:
    """The states to which templates lead that schedule the loops of stage `s` (None: the output's), in order; `made_by` names them."""
    start = Point(state, resolved(state, state.kernel.output if s is None else s), before=made_by(state))
    for p in _Interpreter().follow(steps, start):
        if p.state is not state and not made_by(p.state):
            _MADE_BY.give(p.state, str(p))
        yield p.state


class _Interpreter:
    """One enumeration of a template: it remembers what came to `Cheaper` steps."""

    def __init__(self) -> None:
        self._least: dict[Cheaper, float] = {}

    def follow(self, step: Steps, p: Point) -> Iterator[Point]:
        """The points to which steps lead from one."""
        match step:
            case Hole():
                for value in step.choices(p):
                    yield p.bind(step, value)
            case Apply() | Do():
                after = step.change(p)
                if after is not None:
                    yield p.at(after)
            case Only():
                if step.holds(p):
                    yield p
            case Cheaper():
                cost, least = step.cost(p), self._least.get(step, float("inf"))
                self._least[step] = min(cost, least)
                if cost < least or step.kept(p):
                    yield p
            case Choose():
                for branch in step.steps:
                    yield from self.follow(branch, p)
            case Need():
                yield from (q for q in self.follow(step.steps, p) if q.state is not p.state)
            case Each():
                values = [_Bind(step.hole, value) for value in step.hole.choices(p)]
                yield from self.follow([[value, step.steps] for value in values], p)
            case _Bind():
                yield p.bind(step.hole, step.value)
            case Template():
                yield from _Interpreter().follow(step.steps, replace(p, template=step.name))
            case [first, *rest]:
                for q in self.follow(first, p):
                    yield from self.follow(rest, q)
            case _:
                yield p     # no steps


_MADE_BY: Derived[str] = Derived(lambda state: "")


def made_by(state: Scheduler) -> str:
    """The template that made a state, with its amounts; "" for other states, also after a further opt."""
    return _MADE_BY.known(state) or ""
