"""Defines `svod.torch.compile`: compiles a module through torch.export, for deployment, without Dynamo and guards in the call path."""
from __future__ import annotations

import inspect
import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch.utils import _pytree as pytree

from svod.errors import ArgumentError, ShapeError, StateError, UnsupportedError
from svod.torch.decompositions import decompositions
from svod.torch.functions import GraphFunction
from svod.torch.memory import is_representable
from svod.torch.plans import AtenProgram, attributes_of
from svod.torch.settings import Settings
from svod.torch.watch import registrations
from svod.torch.whole import recurrent_layers_whole

_STATE = {"PARAMETER", "BUFFER", "CONSTANT_TENSOR", "TOKEN"}      # a TOKEN argument only keeps operations with effects in order


def compile(module: Any, *args: Any, dynamic_shapes: Any = None, mode: str | None = None, options: Mapping[str, Any] | None = None,
            device: str | None = None, **kwargs: Any) -> CompiledModule:
    """Compile the module to a function that svod runs. `args` and `kwargs`: example inputs, which fix the sizes, except axes named in
    `dynamic_shapes` (as in torch.export.export): these may differ from call to call. `mode` and `options`: as in
    torch.compile(backend="svod"). `device`: the device that computes tensors on PyTorch's CPU; tensors on CUDA are computed there.

    `module` may be an exported program (torch.export.ExportedProgram), which has its sizes and the ranges of its axes; example inputs are
    checked if they are given.

    Weights are constants, packed once; changes of them are detected. Buffers that the module changes are written in place.

    Raises ArgumentError for another object, and for examples that a module's forward or a program does not take; ShapeError for examples
    of sizes that a program does not have; UnsupportedError for a module that torch.export cannot export, for a program with the graph of a
    backward pass, and under `options={"strict": True}` for operations that svod lacks."""
    settings = Settings.of(mode, options if device is None else {**(options or {}), "device": device})
    if isinstance(module, torch.export.ExportedProgram):
        if dynamic_shapes is not None:
            raise ArgumentError("an exported program has the axes that may differ: dynamic_shapes= belongs to torch.export.export")
        compiled = _of_program(module, settings)
        if args or kwargs:
            compiled.check(*args, **kwargs)
        return compiled
    if not isinstance(module, torch.nn.Module):
        raise ArgumentError("svod.torch.compile takes a torch.nn.Module and example inputs, or a torch.export.ExportedProgram, got "
                            f"{type(module).__name__}")
    try:
        inspect.signature(module.forward).bind(*args, **kwargs)
    except TypeError as error:
        raise ArgumentError(f"svod.torch.compile takes example inputs as {type(module).__name__}.forward does, {error}; options of svod "
                            'go into options={"beam": 8}') from None
    try:
        with torch.no_grad(), recurrent_layers_whole():
            exported = torch.export.export(module, args, kwargs, dynamic_shapes=dynamic_shapes, strict=False)
            exported = exported.run_decompositions(decompositions())
    except Exception as error:      # tracing runs the module's code, which may raise any error
        raise UnsupportedError(f"{type(module).__name__} cannot be exported by torch.export, so torch.compile(module, backend=\"svod\"), "
                               f"which cuts it into graphs, may be the way: {type(error).__name__}: {error}") from error
    held = [held for m in module.modules() for held in (m._parameters, m._buffers, m._modules)]
    return CompiledModule(exported, type(module).__name__, held, settings)


def _of_program(program: Any, settings: Settings) -> CompiledModule:
    """Compile an exported program."""
    # the class of the outermost module; its full name in a program that was read from a file
    kinds = [kind for n in program.graph.nodes for path, kind in (n.meta.get("nn_module_stack") or {}).values() if not path]
    name = str(getattr(kinds[0], "__name__", kinds[0])).rpartition(".")[2] if kinds else "an exported program"
    if program.graph_signature.backward_signature is not None:
        raise UnsupportedError(f"{name} has the graph of a backward pass; svod runs models and does not train them")
    try:
        with torch.no_grad():
            exported = program.run_decompositions(decompositions())
    except Exception as error:      # AOT autograd has errors of many types for graphs that it refuses
        raise UnsupportedError(f"{name}: AOT autograd cannot take it: {type(error).__name__}: {error}") from error
    return CompiledModule(exported, name, [program.state_dict, program.constants], settings)


class CompiledModule:
    """An exported module that svod runs. Call it like the module. `held`: the dicts in which the original modules keep their weights and
    submodules."""

    def __init__(self, exported: Any, name: str, held: Sequence[dict[str, Any]], settings: Settings) -> None:
        signature = exported.graph_signature
        state = {**exported.state_dict, **exported.constants}
        kinds = [(s.kind.name, s.target, s.arg) for s in signature.input_specs]
        mutations = _mutations(signature, kinds)
        self._state = [torch.empty(0) if kind == "TOKEN" else state[target] if kind in _STATE else None for kind, target, _ in kinds]
        weights = {id(t) for t in self._state if t is not None}
        self._places = [(place, key, x, _kind(x)) for place in held for key, x in place.items()
                        if id(x) in weights or isinstance(x, torch.nn.Module)]
        self._registrations = registrations()
        self._registered = self._registrations.count
        self._inputs = [i for i, (kind, _, _) in enumerate(kinds) if kind not in _STATE]
        odd = [kind for kind, _, _ in kinds if kind not in _STATE and kind != "USER_INPUT"]
        if odd:
            raise UnsupportedError(f"{name}: inputs of the kind {odd[0].lower()}")
        state_inputs, written = {i for i, t in enumerate(self._state) if t is not None}, {*mutations.values()}
        static, kept = sorted(state_inputs - written), sorted(state_inputs & written)
        module = exported.module()
        self._in, self._out = exported.call_spec.in_spec, exported.call_spec.out_spec
        placeholders = [n for n in exported.graph.nodes if n.op == "placeholder"]
        self._ranges = exported.range_constraints
        self._expected = [placeholders[i].meta.get("val") for i in self._inputs]
        self._module = module
        # calls with tensors only, and with a single result, skip flattening nested containers
        self._is_flat = self._in == pytree.tree_flatten((tuple(range(len(self._inputs))), {}))[1]
        self._is_one = self._out == pytree.tree_flatten(0)[1]
        program = AtenProgram(name, exported.graph, attributes_of(exported.graph_module), mutations)
        self.function = GraphFunction(program, static, kept, self._eager, settings, "svod.torch.compile", check=self._check,
                                      bound=self._look_for_replaced)

    def _eager(self, *given: Any) -> list[Any]:
        args, kwargs = pytree.tree_unflatten([given[i] for i in self._inputs], self._in)
        return pytree.tree_leaves(self._module(*args, **kwargs))    # type: ignore[no-any-return]

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Run the module. Raises ArgumentError and ShapeError for arguments that it was not compiled for, StateError after a parameter,
        buffer or submodule was replaced by another one."""
        if self._registrations.count != self._registered:
            self._look_for_replaced()
        outputs = self.function(self._given(args, kwargs))
        return outputs[0] if self._is_one else pytree.tree_unflatten(outputs, self._out)

    def check(self, *args: Any, **kwargs: Any) -> None:
        """Raise ArgumentError or ShapeError for arguments that the module was not compiled for."""
        self._check(self._given(args, kwargs))

    def _given(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[Any]:
        """The values of the graph's placeholders in a call."""
        leaves: Sequence[Any] = args
        if not self._is_flat or kwargs or len(args) != len(self._inputs):
            names = self._in.child(1).context       # the order of the keyword arguments that were exported
            leaves, form = pytree.tree_flatten((args, {k: kwargs[k] for k in names} if kwargs.keys() == {*names} else kwargs))
            if form != self._in:
                raise ArgumentError(f"{self.function.name} was compiled for the arguments {_in_words(*self._example())}, and is called "
                                    f"with {_in_words(args, kwargs)}")
        given = list(self._state)
        for i, leaf in zip(self._inputs, leaves, strict=True):
            given[i] = leaf
        return given

    def _look_for_replaced(self) -> None:
        """Raise StateError if a parameter, buffer or submodule was replaced since compilation."""
        registered = self._registrations.count
        for held, key, x, kind in self._places:
            now = held.get(key)
            if now is not x or _kind(now) != kind:
                changed = f"{kind} is now {_kind(now)}" if _kind(now) != kind else f"it is another {kind}"
                raise StateError(f"{self.function.name} was compiled with another {key}: {changed}. Compile it again. Writes in place, and "
                                 "load_state_dict without assign=True, need no compilation")
        self._registered = registered

    def __reduce__(self) -> Any:
        raise ArgumentError(f"what svod.torch.compile makes is neither copied nor pickled: copy {self.function.name}, and compile the copy")

    def _example(self) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """The arguments that the module was compiled for, as fake tensors."""
        args, kwargs = pytree.tree_unflatten(self._expected, self._in)
        return args, kwargs

    def _check(self, given: Sequence[Any]) -> None:
        """Raise one ShapeError for all arguments that the module was not compiled for."""
        wrong, differ = [], False
        sizes: dict[Any, int] = {}
        for i, (t, example) in enumerate(zip([given[i] for i in self._inputs], self._expected, strict=True)):
            if isinstance(example, torch.Tensor):
                if not isinstance(t, torch.Tensor) or t.dtype != example.dtype or not self._fits(t.shape, example.shape, sizes):
                    got = f"{t.dtype} {tuple(t.shape)}" if isinstance(t, torch.Tensor) else type(t).__name__
                    differ = differ or (isinstance(t, torch.Tensor) and t.ndim == example.ndim)
                    wrong.append(f"argument {i}: expected {example.dtype} {tuple(example.shape)}{self._ranges_of(example)}, got {got}")
            elif not isinstance(example, (torch.SymInt, type(None))) and (type(t) is not type(example) or t != example):
                wrong.append(f"argument {i}: {example!r} was compiled in, got {t!r}")
            if isinstance(t, torch.Tensor) and not is_representable(t):
                kind = str(t.layout).removeprefix("torch.")
                wrong.append(f"argument {i}: a {kind} tensor on {t.device}; svod reads strided tensors on the CPU and CUDA")
        if wrong:
            hint = ". dynamic_shapes= names axes that may differ" if differ else ""
            raise ShapeError(f"{self.function.name}: {'; '.join(wrong)}{hint}")

    def _fits(self, shape: Any, expected: Any, sizes: dict[Any, int]) -> bool:
        """Whether a shape is within an exported one. `sizes`: the values of the symbols read so far; the symbols of this shape are
        added."""
        if len(shape) != len(expected):
            return False
        for n, e in zip(shape, expected, strict=True):
            if isinstance(e, torch.SymInt) and (symbol := e.node.expr).is_Symbol:
                low, high = self._range(symbol)
                if sizes.setdefault(symbol, n) != n or not low <= n <= high:
                    return False
            elif (e.node.expr.subs(sizes) if isinstance(e, torch.SymInt) else e) != n:
                return False
        return True

    def _range(self, symbol: Any) -> tuple[int, float]:
        """The least and the largest size that a symbol may have. torch.export gives 2 as the least size of axes that may also have the
        extents 0 and 1, so that 2 is returned as 0."""
        found = self._ranges.get(symbol)
        if found is None:
            return 0, math.inf
        return 0 if found.lower <= 2 else int(found.lower), int(found.upper) if found.upper.is_Integer else math.inf

    def _ranges_of(self, example: Any) -> str:
        """The ranges of the sizes in an example's shape, for errors: " with 3 <= s0 <= 8"."""
        ranges = {str(e): self._range(e.node.expr) for e in example.shape if isinstance(e, torch.SymInt) and e.node.expr.is_Symbol}
        words = [f"{low} <= {e} <= {high}" for e, (low, high) in ranges.items() if low or high < math.inf]
        return f" with {', '.join(words)}" if words else ""

    @property
    def plans(self) -> tuple[Any, ...]:
        """The execution plans so far."""
        return tuple([p.captured.plan for p in self.function.plans if p.captured is not None])


def _mutations(signature: Any, kinds: Sequence[tuple[str, str | None, Any]]) -> dict[int, int]:
    """The outputs of an exported graph that are new contents of inputs: number of the output → number of the input."""
    numbers = {target: i for i, (_, target, _) in enumerate(kinds) if target is not None}
    arguments = {arg.name: i for i, (_, _, arg) in enumerate(kinds)}
    tokens = [i for i, (kind, _, _) in enumerate(kinds) if kind == "TOKEN"]
    found = {}
    for i, spec in enumerate(signature.output_specs):
        match spec.kind.name:
            case "BUFFER_MUTATION": found[i] = numbers[spec.target]
            case "USER_INPUT_MUTATION": found[i] = arguments[spec.target]
            case "TOKEN": found[i] = tokens[i]
    return found


def _kind(x: Any) -> str:
    """A description of a module's attribute for errors: "float32 (3, 4)", or the name of its type."""
    return f"{str(x.dtype).removeprefix('torch.')} {tuple(x.shape)}" if isinstance(x, torch.Tensor) else type(x).__name__


def _in_words(args: Any, kwargs: Any) -> str:
    """The arguments of a call as text: "(Tensor, [Tensor, 3], scale=Tensor)"."""
    def word(value: Any) -> str:
        if isinstance(value, dict):
            return "{" + ", ".join(f"{k!r}: {word(v)}" for k, v in value.items()) + "}"
        if isinstance(value, (list, tuple)):
            return ("[{}]" if isinstance(value, list) else "({})").format(", ".join(map(word, value)))
        return "Tensor" if isinstance(value, torch.Tensor) else repr(value)
    return "(" + ", ".join([*map(word, args), *(f"{k}={word(v)}" for k, v in kwargs.items())]) + ")"

