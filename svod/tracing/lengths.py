"""Arguments with lengths that differ from call to call: a warning tells of them once, or one plan serves all lengths.

    f(x of 17×8), f(x of 30×8)      the keys differ in the first axis of x
      told        "f was captured for 4 lengths of axis 0 of x … declare a Variable"
      one plan    n = Variable("n0", 1, 64); x is copied to the layout of 64×8, and the plan runs with n = 17, 30, …

A `LengthPlace` is an extent of a tensor argument, or an int argument. Places that always have the same value share a variable. An extent
of 1 broadcasts, so it is never the value of a variable.
"""
from __future__ import annotations

import inspect
import itertools
from collections.abc import Callable, Hashable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from svod.core.graph import graph
from svod.core.graph.buffer import Array, aligned_empty
from svod.core.graph.memory import node_over
from svod.core.ir.dtype import DType, to_dtype
from svod.core.ir.variable import Dim, Variable, is_symbolic, layout_shape
from svod.tensor import Tensor
from svod.tracing.arguments import Leaf, as_tensor, is_leaf, mapped
from svod.tracing.captured import Captured

FEW = 4         # number of different lengths after which the warning is given
LEAST = 16      # least upper bound of a variable; larger ones are twice the largest value so far, rounded up to a power of two


class LengthPlace(NamedTuple):
    """A number among the arguments that may vary: extent `axis` of argument `leaf` (counting nested ones), or that argument itself, an
    int, if `axis` is None."""

    leaf: int
    axis: int | None


class ArgumentsForm(NamedTuple):
    """The arguments of a call: `lengths`, and in `frame` everything else. Calls with an equal frame may share one plan."""

    frame: Hashable
    lengths: dict[LengthPlace, int]


def form_of(args: Any, kwargs: Mapping[str, Any], given: Sequence[Leaf]) -> ArgumentsForm | None:
    """The form of a call; None if its arguments have declared variables already."""
    lengths: dict[LengthPlace, int] = {}
    frame: list[Hashable] = []
    leaves = iter(given)
    has_variables = False

    def note(value: Any) -> None:
        nonlocal has_variables
        number = len(frame)
        has_variables |= isinstance(value, Dim)
        if is_leaf(value):
            leaf = next(leaves)
            frame.append((len(leaf.shape), as_tensor(leaf).dtype if isinstance(leaf, Tensor) else leaf.dtype))
            lengths.update({LengthPlace(number, axis): n for axis, n in enumerate(leaf.shape)})
        elif type(value) is int and value >= 0:
            frame.append("int")
            lengths[LengthPlace(number, None)] = value
        else:
            frame.append((type(value).__name__, repr(value) if isinstance(value, float) else value))
    structure = mapped([list(args), dict(kwargs)], note)
    if has_variables or any(type(n) is not int for n in lengths.values()):
        return None
    return ArgumentsForm((repr(structure), tuple(frame)), lengths)


class Lengths:
    """The lengths that a function was captured for, by frame (the arguments without lengths)."""

    def __init__(self) -> None:
        self._seen: dict[Hashable, list[dict[LengthPlace, int]]] = {}
        self.is_said = False

    def note(self, form: ArgumentsForm) -> dict[LengthPlace, list[int]]:
        """Remember the lengths of a captured call. Returns the places whose values have differed among calls of its frame, with these
        values."""
        seen = self._seen.setdefault(form.frame, [])
        if form.lengths not in seen:
            seen.append(form.lengths)
        values = {place: list(dict.fromkeys(lengths[place] for lengths in seen)) for place in form.lengths}
        return {place: v for place, v in values.items() if len(v) > 1}

    def advice(self, name: str, fn: Callable[..., Any], args: Any, kwargs: Any, differing: Mapping[LengthPlace, list[int]]) -> str:
        """The warning about a function that is captured for many lengths; "" if it was given before, or there are less than `FEW`."""
        many = {place: v for place, v in differing.items() if len(v) >= FEW}
        if self.is_said or not many:
            return ""
        self.is_said = True
        place, values = next(iter(many.items()))
        low, high = min(values), max(values)
        label = _labels(fn, args, kwargs)[place.leaf]
        what = f"{len(values)} values of {label}" if place.axis is None else f"{len(values)} lengths of axis {place.axis} of {label}"
        bind = f"n.bind({label})" if place.axis is None else f"{label}[{':, ' * place.axis}:n.bind(length)]"
        whole = "" if place.axis is None else f", where {label} is a svod.Tensor that is {bound_for(values)} long"
        return (f"svod.jit: {name} was captured for {what} ({low} … {high}), each with a plan of its own; one plan serves all of them "
                f"with svod.jit(…, dynamic=\"auto\"); or with a variable: n = svod.Variable(\"n\", {min(low, 1)}, {bound_for(values)}), "
                f"and {name}(… {bind} …){whole}")


def bound_for(values: Sequence[int]) -> int:
    """The upper bound of a variable that has had these values so far."""
    return max(LEAST, 1 << (2 * max(values) - 1).bit_length())


def _labels(fn: Callable[..., Any], args: Any, kwargs: Mapping[str, Any]) -> list[str]:
    """The name of each leaf among the arguments: the parameter that it belongs to. For a module, parameters of `forward`."""
    try:
        names = list(inspect.signature(getattr(fn, "forward", fn)).parameters)
    except (TypeError, ValueError):     # a builtin
        names = []
    labels: list[str] = []

    def under(name: str, value: Any) -> None:
        mapped(value, lambda _: labels.append(name))
    for i, value in enumerate(args):
        under(names[i] if i < len(names) else f"argument {i}", value)
    for name, value in kwargs.items():
        under(name, value)
    return labels


class OnePlan:
    """One plan for all lengths of a frame: a variable for each group of places that have been equal, and memory in the layout of the
    largest lengths, to which arguments are copied."""

    def __init__(self, number: int, form: ArgumentsForm, differing: Mapping[LengthPlace, list[int]]) -> None:
        self.fixed = {place: n for place, n in form.lengths.items() if place not in differing}
        groups: dict[tuple[int, ...], list[LengthPlace]] = {}
        for place, values in differing.items():
            groups.setdefault((place.axis is None, *values), []).append(place)
        self.variables: dict[LengthPlace, Variable] = {}
        for i, ((is_count, *seen), places) in enumerate(groups.items()):
            variable = Variable(f"n{number}_{i}", 0 if is_count else 1, bound_for(seen))
            self.variables.update(dict.fromkeys(places, variable))
        self.captured: Captured | None = None
        self._memory: dict[int, Array] = {}     # value: memory in the layout of the largest lengths; key: number of the leaf
        self._leaves: list[int] = []            # the numbers of the leaves that are tensors

    def holds(self, lengths: Mapping[LengthPlace, int]) -> bool:
        """Whether the plan can run for these lengths: fixed ones are equal, others within their variable's bounds and equal within a
        group."""
        if any(lengths[place] != n for place, n in self.fixed.items()):
            return False
        values: dict[str, int] = {}
        return all(v.min <= (n := lengths[place]) <= v.max and (n != 1 or place.axis is None) and values.setdefault(v.name, n) == n
                   for place, v in self.variables.items())

    def values(self, lengths: Mapping[LengthPlace, int]) -> dict[str, int]:
        """The value of each variable, by name, for these lengths."""
        return {v.name: lengths[place] for place, v in self.variables.items()}

    def arguments(self, args: Any, kwargs: Any, given: Sequence[Leaf]) -> tuple[Any, Any, list[Tensor]]:
        """The arguments to capture with, where variables stand for lengths, and the tensors among them."""
        tensors: list[Tensor] = []
        leaves, numbers = iter(given), itertools.count()
        self._leaves.clear()

        def replaced(value: Any) -> Any:
            number = next(numbers)
            if is_leaf(value):
                self._leaves.append(number)
                tensors.append(self._tensor(number, next(leaves)))
                return tensors[-1]
            variable = self.variables.get(LengthPlace(number, None))
            return value if variable is None else variable.bind(value)
        return mapped(list(args), replaced), mapped(dict(kwargs), replaced), tensors

    def _tensor(self, leaf: int, value: Leaf) -> Tensor:
        """The tensor of an argument. If it has variable lengths, the values are copied to memory in the layout of the largest ones."""
        if not any(LengthPlace(leaf, axis) in self.variables for axis in range(len(value.shape))):
            return as_tensor(value)
        shape = tuple([self.variables[place].bind(n) if (place := LengthPlace(leaf, axis)) in self.variables else n
                       for axis, n in enumerate(value.shape)])
        dtype: DType = value.dtype if isinstance(value, Tensor) else to_dtype(value.dtype)
        self._memory[leaf] = memory = aligned_empty(int(np.prod(layout_shape(shape))), dtype).reshape(layout_shape(shape))
        memory.reshape(-1).view(np.uint8)[:] = 0
        self._fill(leaf, value)
        return Tensor.from_uop(graph.storage_view(node_over(memory.reshape(-1), dtype, shared=False, given=None), shape))

    def _fill(self, leaf: int, value: Leaf) -> None:
        array = value if isinstance(value, np.ndarray) else value._values()
        self._memory[leaf][tuple([slice(0, n) for n in array.shape])] = array

    def filled(self, given: Sequence[Leaf]) -> list[Leaf]:
        """The arrays of a run: arguments with variable lengths are copied to the plan's memory, others are passed on."""
        out: list[Leaf] = []
        for number, leaf in zip(self._leaves, given, strict=True):
            if number in self._memory:
                self._fill(number, leaf)
                out.append(self._memory[number])
            else:
                out.append(leaf)
        return out

    def capture(self, make: Callable[[Any, Any, list[Tensor]], Captured], args: Any, kwargs: Any, given: Sequence[Leaf]) -> bool:
        """Capture with variables, by calling `make`. Returns False and keeps nothing if the function assigns to an argument of variable
        length, because the copy would be written instead. Raises SvodError for a function that depends on the number itself."""
        arguments, options, tensors = self.arguments(args, kwargs, given)
        captured = make(arguments, options, tensors)
        written = captured.prepared.overwritten
        copied = {i for i, t in enumerate(tensors) if is_symbolic(t.shape)}
        if any(i in copied and number in written for i, number in captured.reads):
            return False
        self.captured = captured
        return True

    def run(self, given: Sequence[Leaf], lengths: Mapping[LengthPlace, int], more: Sequence[Leaf]) -> Any:
        """Run the plan for these lengths. `more`: operands after the arguments, such as random keys."""
        assert self.captured is not None
        result = self.captured.run([*self.filled(given), *more], self.values(lengths), sized=True)
        return mapped(result, self._with_lengths)

    def _with_lengths(self, value: Any) -> Any:
        """Convert a result with variable lengths to a tensor with the lengths of this run; return any other value unchanged."""
        if not isinstance(value, Tensor) or not is_symbolic(value.shape):
            return value
        array = np.require(value._values(), None, ("C", "A"))
        # a returned argument: the next run overwrites this memory
        if any(np.may_share_memory(array, memory) for memory in self._memory.values()):
            array = array.copy()
        return Tensor._over(array, value.dtype, False)
