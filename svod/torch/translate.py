"""Translates an FX graph of ATen operations to svod tensors.

    placeholder x        svod tensor, or int
    mm(x, w)             TABLE["aten.mm.default"].function(x, w)
    view(mm, [-1, s0])   sizes are ints, or expressions of the variables of a plan for all sizes
    frobnicate(view)     not in the table: PyTorch runs it (fallback.py)
    copy_(cache, new)    an assignment to the input
"""
from __future__ import annotations

import functools
import logging
import operator
import re
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch.fx.node import map_arg

from svod.core.ir.dtype import DType, accumulator
from svod.core.ir.origin import scope
from svod.errors import SvodError, UnsupportedError
from svod.tensor import Tensor
from svod.tensor.precision import is_half, widened
from svod.torch.fallback import FallbackSeconds, Foreign, run_in_torch
from svod.torch.memory import DTYPES, TORCH_DTYPES, svod_dtype
from svod.torch.operations import COMPLEX, TABLE, Operation
from svod.torch.operations.complex_numbers import Complex
from svod.torch.varying.merged import VIEWS_OF_ATEN, MergedAxes, reshaped, through, without_merged
from svod.torch.varying.sizes import SizeVariables

log = logging.getLogger("svod.torch")

# arguments about the device and layout of memory
_PLACES = ("device", "layout", "pin_memory", "memory_format", "non_blocking", "generator")
_IGNORED = {"aten._assert_scalar.default", "aten._assert_async.msg", "aten._assert_tensor_metadata.default",
            "aten.sym_constrain_range_for_size.default", "aten.sym_constrain_range.default"}
_ROOT = re.compile(r"^(L\['\w+'\]|L__self__|self)(\.__self__)?")        # Dynamo's names for the outermost module


class Missing(NamedTuple):
    """An operation that svod lacks: the reason, how often it occurs, and its first place in the user's program."""

    name: str
    why: str
    times: int
    place: str


class Translation(NamedTuple):
    """The result of a translation. `outputs`: svod tensors, ints, None, or the placeholder of an input that is returned unchanged.
    `mutated`: the new contents of inputs, by number. `effects`: unused results of operations that are run for their effects."""

    outputs: list[Any]
    mutated: dict[int, Tensor]
    missing: list[Missing]
    effects: list[Tensor]


def translate(graph: Any, inputs: Sequence[Any], attributes: Mapping[str, Any], clock: FallbackSeconds,
              sizes: SizeVariables | None = None) -> Translation:
    """Translate a graph. `inputs`: for each placeholder a svod tensor or an int; `attributes`: the svod tensors of its get_attr nodes.
    `clock` counts the seconds that PyTorch takes in runs. `sizes`: the variables of sizes that vary.

    Raises UnsupportedError for an operation that neither svod nor PyTorch can run inside a plan, such as one with sizes that depend on
    values, and for one that needs the number of a size that varies."""
    walk = _Walk(graph, inputs, attributes, clock, sizes)
    for node in graph.nodes:
        walk.step(node)
    outputs = next(n for n in graph.nodes if n.op == "output").args[0]
    # an input that is returned unchanged is represented by its placeholder
    found = [o if isinstance(o, torch.fx.Node) and o.op == "placeholder" else walk.value(o) for o in outputs]
    return Translation([_value_of(o) for o in found], walk.mutated, walk.missing(), walk.effects)


def unsupported(graph: Any) -> list[Missing]:
    """The operations of a graph that are not in the table, each once."""
    counts: Counter[str] = Counter()
    first: dict[str, Any] = {}
    for node in graph.nodes:
        if node.op == "call_function" and isinstance(node.target, torch._ops.OpOverload) and not _is_known(node):
            counts[str(node.target)] += 1
            first.setdefault(str(node.target), node)
    return [Missing(name, "svod has no such operation", n, place_of(first[name])) for name, n in counts.items()]


def _is_known(node: Any) -> bool:
    name = str(node.target)
    found = name in TABLE or name in COMPLEX or name in _IGNORED
    return found or name.startswith(("aten.sym_", "aten.copy_.", "prims.convert_element_type"))


def place_of(node: Any) -> str:
    """The position of an operation in the user's program: "model.py:41"; without a stack trace, the name of its node."""
    trace = node.meta.get("stack_trace") or ""
    lines = [line.strip() for line in trace.splitlines() if line.strip().startswith("File ")]
    return place_of_entry(lines[-1]) if lines else str(node.name)


def place_of_entry(entry: str) -> str:
    """File and line of an entry of a stack trace: 'File "/a/model.py", line 12, in forward' → "model.py:12"."""
    found = re.match(r'File "(.*)", line (\d+)', entry)
    return f"{found[1].rsplit('/', 1)[-1]}:{found[2]}" if found else entry


class _Walk:
    """The values of the nodes translated so far."""

    def __init__(self, graph: Any, inputs: Sequence[Any], attributes: Mapping[str, Any], clock: FallbackSeconds,
                 sizes: SizeVariables | None) -> None:
        self.clock, self.sizes = clock, sizes
        self.values: dict[Any, Any] = {}
        self.inputs, self.attributes = iter(inputs), attributes
        self.place = {n: i for i, n in enumerate(n for n in graph.nodes if n.op == "placeholder")}
        self.mutated: dict[int, Tensor] = {}
        self.effects: list[Tensor] = []
        self._missing: dict[tuple[str, str], list[Any]] = {}

    def missing(self) -> list[Missing]:
        return [Missing(name, why, len(nodes), place_of(nodes[0])) for (name, why), nodes in self._missing.items()]

    def value(self, argument: Any) -> Any:
        """Replace nodes by their values in an argument."""
        return map_arg(argument, lambda n: self.values[n])

    def step(self, node: Any) -> None:
        """Compute the value of a node."""
        if node.op == "placeholder":
            self.values[node] = next(self.inputs)
        elif node.op == "get_attr":
            if node.target not in self.attributes:
                raise UnsupportedError(f"control flow at {place_of(node)}, such as torch.cond: {node.target} is a graph of its own")
            self.values[node] = self.attributes[node.target]
        elif node.op == "call_function":
            with scope(module_of(node)):
                self.values[node] = self._called(node)
        elif node.op != "output":
            raise UnsupportedError(f"{node.op} {node.target} in a graph of ATen operations")

    def _called(self, node: Any) -> Any:
        target = node.target
        args, kwargs = self.value(node.args), self.value(node.kwargs)
        if target is operator.getitem:
            return self._item(node, *args)
        name = str(target)
        if name in _IGNORED:
            return None
        if name.startswith("aten.sym_size"):
            return args[0].shape[args[1]] if len(args) > 1 else args[0].shape
        if name.startswith("aten.sym_numel"):
            return args[0].numel()
        if name == "aten.copy_.default":
            return self._copied(node, *args[:2])
        if name == "with_effects":
            return self._with_effects(node, *args, **kwargs)
        if not isinstance(target, torch._ops.OpOverload):
            return self._plain(node, args, kwargs)
        if name.startswith("aten.as_strided"):
            _check_storage(node, *args[2 if "scatter" in name else 1:])
        parts = None
        if self.sizes is not None:
            if name in VIEWS_OF_ATEN and isinstance(args[0], (Tensor, MergedAxes)):
                return reshaped(args[0], self.sizes.shape(node.meta["val"]))
            args, parts = through(name, target, args)
            kwargs = without_merged(kwargs)
        made = self._of_plain(node, name, args, kwargs)
        return made if parts is None else MergedAxes(made, parts)

    def _of_plain(self, node: Any, name: str, args: Any, kwargs: Any) -> Any:
        """The results of an operation on tensors without merged axes."""
        target = node.target
        operation = _operation(name, args, node.meta.get("val"))
        if operation is None and name == "prims.convert_element_type.default":
            return args[0].cast(svod_dtype(args[1]))
        why = "svod has no such operation"
        if operation is not None:
            try:
                return self._translated(operation, node, args, kwargs)
            except (SvodError, NotImplementedError) as error:
                why = str(error)
            except Exception:       # such as Python's for arithmetic on a size that has no value
                if self.sizes is None:
                    raise
                log.debug("%s at %s", name, place_of(node), exc_info=True)
                why = "it needs the value of a size that varies"
        self._missing.setdefault((name, why), []).append(node)
        try:
            return run_in_torch(target, args, kwargs, self.clock)
        except UnsupportedError as error:
            if self.sizes is None:
                raise
            raise UnsupportedError(f"{name} at {place_of(node)}: {why}") from error

    def _translated(self, operation: Operation, node: Any, args: Any, kwargs: Mapping[str, Any]) -> Any:
        """The results of svod's function in the dtypes that PyTorch gives. Results for 16-bit floats are computed in float32 and rounded
        here."""
        if _has_foreign(args):
            raise UnsupportedError("it reads values that svod has no dtype for")
        wanted = node.meta.get("val")
        for w in wanted if isinstance(wanted, (tuple, list)) else (wanted,):
            if isinstance(w, torch.Tensor) and not w.dtype.is_complex:
                svod_dtype(w.dtype)
        given = [_known(a) for a in args]
        named = {k: _known(v) for k, v in kwargs.items() if k not in _PLACES and v is not None}
        if operation.promotes:
            given = promoted(given, wanted, operation.widens)
        if operation.widens:
            given, named = widened(given), widened(named)
        return _with_dtypes(operation.function(*given, **named), wanted)

    def _item(self, node: Any, values: Any, index: int) -> Any:
        """Select one of several results. A result that is given as a function is computed here."""
        item = values[index]
        if not callable(item) or isinstance(item, Tensor):
            return item
        try:
            return _with_dtypes(item(), node.meta.get("val"))
        except (SvodError, NotImplementedError) as error:
            source = node.args[0]
            self._missing.setdefault((str(source.target), str(error)), []).append(source)
            return run_in_torch(source.target, self.value(source.args), self.value(source.kwargs), self.clock)[index]

    def _copied(self, node: Any, target: Any, value: Any) -> Any:
        """Translate `copy_` into an input, the only write of a functional graph."""
        place = self.place.get(node.args[0])
        if place is None:
            raise UnsupportedError("copy_ to a tensor that is no input")
        made: Tensor = without_merged(value).cast(target.dtype).expand(target.shape)
        self.mutated[place] = made
        return made

    def _with_effects(self, node: Any, token: Any, operation: Any, *args: Any, **kwargs: Any) -> Any:
        """The results of an operation that raises or prints, which PyTorch runs. An empty tensor, the token, keeps such operations in
        order."""
        if not isinstance(operation, torch._ops.OpOverload):
            raise UnsupportedError(f"{operation} at {place_of(node)}, which has effects")

        def run(previous: Any, *given: Any, **named: Any) -> Any:
            made = operation(*given, **named)
            return torch.zeros(1), *(made if isinstance(made, tuple) else (made,))
        run.__name__ = str(operation)
        self._missing.setdefault((str(operation), "it has effects"), []).append(node)
        done, *results = run_in_torch(run, (self.effects[-1] if self.effects else None, *args), kwargs, self.clock)
        self.effects.append(done)
        return token, *results

    def _plain(self, node: Any, args: Any, kwargs: Any) -> Any:
        """Call a function of sizes, such as an addition of two ints."""
        leaves: list[Any] = []
        map_arg((node.args, node.kwargs), leaves.append)
        if not callable(node.target) or any(isinstance(self.values[n], (Tensor, Foreign)) for n in leaves):
            raise UnsupportedError(f"{getattr(node.target, '__name__', node.target)} at {place_of(node)}")
        try:
            return node.target(*args, **kwargs)
        except (SvodError, TypeError) as error:
            if self.sizes is None:
                raise
            raise UnsupportedError(f"{node.target.__name__} of a size at {place_of(node)}: {error}") from error


def _check_storage(node: Any, size: Sequence[int], stride: Sequence[int], offset: int | None = None) -> None:
    """Raise UnsupportedError for as_strided of a tensor that is not contiguous from the beginning of its storage in PyTorch, or that
    reaches beyond the tensor's elements: as_strided reads the storage, of which svod knows only the tensor's elements."""
    example = node.args[0].meta.get("val")
    if not isinstance(example, torch.Tensor):
        return
    last = (offset or 0) + sum((n - 1) * s for n, s in zip(size, stride, strict=True))
    if not (example.is_contiguous() and example.storage_offset() == 0):
        raise UnsupportedError(f"as_strided of a tensor with gaps or another order of axes, at {place_of(node.args[0])}")
    if 0 not in size and last >= example.numel():
        raise UnsupportedError(f"as_strided beyond the elements of a tensor, at {place_of(node)}")


def _value_of(output: Any) -> Any:
    if isinstance(output, Foreign):
        raise UnsupportedError(f"a result of dtype {output.example.dtype}, which svod lacks")
    return output() if callable(output) and not isinstance(output, (Tensor, torch.fx.Node)) else output


def _operation(name: str, args: Sequence[Any], wanted: Any) -> Operation | None:
    """svod's implementation of an operation; None if there is none. `wanted`: a fake tensor like the result."""
    makes = isinstance(wanted, torch.Tensor) and wanted.dtype.is_complex
    if makes or any(isinstance(a, Complex) for a in args):
        function = COMPLEX.get(name)
        return None if function is None else Operation(function)
    return TABLE.get(name)


def _has_foreign(args: Any) -> bool:
    return any((isinstance(a, Foreign) and not isinstance(a, Complex)) or (isinstance(a, (list, tuple)) and _has_foreign(a)) for a in args)


def _known(value: Any) -> Any:
    """Convert a dtype to svod's, complex ones to the dtype of their parts; return other values unchanged."""
    if not isinstance(value, torch.dtype):
        return value
    return svod_dtype(value.to_real() if value.is_complex else value)


def _with_dtypes(made: Any, wanted: Any) -> Any:
    """Results cast to the dtypes of PyTorch's results."""
    if isinstance(made, Complex):
        parts = DTYPES[wanted.dtype.to_real()]
        return Complex(made.real.cast(parts), made.imag.cast(parts))
    if isinstance(made, Tensor):
        dtype = DTYPES.get(getattr(wanted, "dtype", None))
        return made if dtype is None else made.cast(dtype)
    if isinstance(made, (tuple, list)) and isinstance(wanted, (tuple, list)):
        return tuple([_with_dtypes(m, w) for m, w in zip(made, wanted, strict=True)])
    return made


def promoted(args: Sequence[Any], wanted: Any = None, widens: bool = False) -> list[Any]:
    """Cast operands to the type in which PyTorch computes. Numbers, and tensors without axes, do not widen tensors of the same kind.
    `wanted`: a fake tensor like the result; if it is a float, integers are computed in its type. For integer tensors, only the lowest
    bits of a number count. With `widens`, a tensor without axes combined with 16-bit floats keeps its value unrounded, as a number does."""
    tensors = [a for a in args if isinstance(a, Tensor)]
    types = {t.dtype for t in tensors}
    numbers = [a for a in args if isinstance(a, (int, float)) and not isinstance(a, bool)]
    floats = isinstance(wanted, torch.Tensor) and wanted.dtype.is_floating_point
    if len(types) == 1 and (next(iter(types)).is_float or not (numbers or floats)):
        return list(args)
    examples: list[Any] = [_example(t.dtype, t.ndim > 0) for t in tensors] + numbers
    common = functools.reduce(_meeting, examples)
    dtype = svod_dtype(common.dtype if isinstance(common, torch.Tensor) else torch.result_type(common, common))
    if floats and not dtype.is_float:
        dtype = svod_dtype(wanted.dtype)
    for_one = accumulator(dtype) if widens and is_half(dtype) else dtype
    return [a.cast(dtype if a.ndim else for_one) if isinstance(a, Tensor) else _fitting(a, dtype) for a in args]


def _fitting(number: Any, dtype: DType) -> Any:
    """Reduce a number to the lowest bits of an integer dtype, as PyTorch does for operands."""
    if not dtype.is_int or not isinstance(number, int) or isinstance(number, bool):
        return number
    low = number & (1 << dtype.bits) - 1
    return low - (1 << dtype.bits) if dtype.is_signed and low >> (dtype.bits - 1) else low


def _meeting(a: Any, b: Any) -> Any:
    """A fake tensor of the type to which two operands are promoted, with an axis if one of them has any."""
    has_axes = any(isinstance(x, torch.Tensor) and x.ndim for x in (a, b))
    return torch.empty((1,) if has_axes else (), dtype=torch.result_type(a, b), device="meta")


@functools.cache
def _example(dtype: Any, has_axes: bool) -> Any:
    return torch.empty((1,) if has_axes else (), dtype=TORCH_DTYPES[dtype], device="meta")


def module_of(node: Any) -> str:
    """The path of the module that an operation belongs to: "layer1.0.conv1"; for an operation outside of modules, the node's name."""
    stack = node.meta.get("nn_module_stack")
    if not stack:
        return str(node.name)
    path = _ROOT.sub("", str(next(reversed(stack.values()))[0]))
    return path.replace("['", ".").replace("']", "").replace("_modules.", "").strip("._") or str(node.name)


