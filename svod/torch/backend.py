"""The backend of `torch.compile(model, backend="svod")`: compiles an FX graph of Dynamo to a function that svod runs.

    Dynamo's graph → AOT autograd: functional, decomposed, an inference graph → GraphFunction

PyTorch imports this module by the entry point `torch_dynamo_backends`; no function of PyTorch is replaced. Some functions that PyTorch
would decompose, although svod implements them, become operators of svod in the graph (`whole.py`).
"""
from __future__ import annotations

import functools
import inspect
import logging
import weakref
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from types import FrameType
from typing import Any

import torch
from torch._dynamo.backends.common import aot_autograd
from torch._dynamo.callback import callback_handler
from torch._dynamo.convert_frame import ConvertFrameAssert
from torch._dynamo.eval_frame import innermost_backend
from torch._dynamo.exc import ShortenTraceback, TorchDynamoException
from torch._guards import TracingContext
from torch.utils.weak import WeakTensorKeyDictionary

from svod.errors import SvodError, UnsupportedError
from svod.torch.decompositions import decompositions
from svod.torch.functions import GraphFunction
from svod.torch.memory import is_representable
from svod.torch.plans import AtenProgram, attributes_of
from svod.torch.reports import graph_breaks
from svod.torch.settings import Settings
from svod.torch.translate import place_of_entry
from svod.torch.whole import keep_whole, recurrent_layers_whole

ENTRY = 'torch.compile(backend="svod")'
NEEDS_GRADIENTS = ("it needs gradients. svod runs models and does not train them: call it under torch.inference_mode() or "
                   "torch.no_grad(), or give its parameters requires_grad_(False)")
_said: set[tuple[str, str]] = set()     # (graph, reason) of the warnings given so far; each is given once
_trained = WeakTensorKeyDictionary()    # the first parameter of each graph that got a warning about gradients
_while_tracing = ExitStack()            # settings of PyTorch for the code that Dynamo traces now
log = logging.getLogger("svod.torch")


def _watch(register: Callable[[Callable[[Any], None]], Any], called: Callable[[Any], None]) -> None:
    """Give Dynamo a callback, for as long as this process lives: where Dynamo drops it, as `torch._dynamo.reset` does, another one takes
    its place. Nothing but Dynamo's list refers to the registered object, so that its end is that of its registration."""
    callback = functools.partial(called)
    register(callback)
    weakref.finalize(callback, _watch, register, called).atexit = False


def _before_tracing(_: Any) -> None:
    """Allow Dynamo to trace recurrent layers if the trace that begins is for svod. By default Dynamo breaks the graph at such layers."""
    if _traces_for_svod():
        _while_tracing.enter_context(torch._dynamo.config.patch(allow_rnn=True))
        _while_tracing.enter_context(recurrent_layers_whole())


def _traces_for_svod() -> bool:
    """Whether the trace that Dynamo begins is for the svod backend. Dynamo passes no backend to its callbacks, so it is read
    from the frame of Dynamo's that is on the stack."""
    frame = inspect.currentframe()
    while frame is not None and frame.f_code is not ConvertFrameAssert.__call__.__code__:
        frame = frame.f_back
    backend = None if frame is None else innermost_backend(frame.f_locals["self"])
    return getattr(backend, "compiler_fn", backend) is svod_backend


def _after_tracing(_: Any) -> None:
    """Restore PyTorch's settings, and warn, once for each reason, about code that Dynamo left out of all graphs: PyTorch runs it without
    svod."""
    _while_tracing.close()
    for reason, explanation in graph_breaks().items():
        if ("", reason) not in _said:
            _said.add(("", reason))
            log.warning("svod: Dynamo breaks the graph, and PyTorch runs what stands there: %s. %s TORCH_LOGS=graph_breaks says where; "
                        "fullgraph=True makes an error of it.", reason.rstrip("."), explanation and explanation.rstrip(".") + ".")


def svod_backend(gm: Any, example_inputs: Sequence[Any], *, mode: str | None = None,
                 options: Mapping[str, Any] | None = None) -> Callable[..., Any]:
    """Compile one of Dynamo's graphs to a function that svod runs. Graphs that svod cannot run are left to PyTorch, with a warning that
    gives the reason.

    Raises ConfigError for unknown options, and under `options={"strict": True}` UnsupportedError for a graph that svod cannot run."""
    try:
        return _function_of(gm, example_inputs, mode, options)
    except SvodError as error:
        raise as_it_is(error, inspect.currentframe()) from None


def _function_of(gm: Any, example_inputs: Sequence[Any], mode: str | None, options: Mapping[str, Any] | None) -> Callable[..., Any]:
    settings = Settings.of(mode, options)
    name = name_of(gm)
    reason = cannot(example_inputs)
    if reason is None:
        try:
            return _compiled(gm, example_inputs, name, settings)    # type: ignore[no-any-return]
        except TorchDynamoException:    # Dynamo raises these to make another attempt
            raise
        except Exception as error:      # AOT autograd has errors of many types for graphs that it refuses
            reason = f"AOT autograd cannot take it: {type(error).__name__}: {error}"
    if settings.strict:
        raise UnsupportedError(f"{name}: {reason}")
    if reason == NEEDS_GRADIENTS:
        return _saying_so(gm.forward, name)
    if (name, reason) not in _said:
        _said.add((name, reason))
        log.warning("svod: %s: PyTorch runs %s as it is: %s", ENTRY, name, reason)
    return gm.forward   # type: ignore[no-any-return]


def _saying_so(forward: Callable[..., Any], name: str) -> Callable[..., Any]:
    """A function that runs a graph in PyTorch because it needs gradients, and warns once for each model. Models with the same code share
    a graph, so the first parameter among the arguments tells which model it is."""
    def run(*args: Any) -> Any:
        first = next((a for a in args if isinstance(a, torch.nn.Parameter)), None)
        if (name, NEEDS_GRADIENTS) not in _said or (first is not None and first not in _trained):
            _said.add((name, NEEDS_GRADIENTS))
            if first is not None:
                _trained[first] = True
            log.warning("svod: %s: PyTorch runs %s as it is: %s", ENTRY, name, NEEDS_GRADIENTS)
        return forward(*args)
    return run


def as_it_is(error: SvodError, frame: FrameType | None) -> SvodError:
    """Convert the error to a ShortenTraceback, which Dynamo does not wrap in BackendCompilerFailed. The traceback that users see begins
    at `frame`."""
    kind = type(type(error).__name__, (ShortenTraceback, type(error)), {"__module__": type(error).__module__})
    made: SvodError = kind(*error.args, first_useful_frame=frame)
    return made


class _Refused(Exception):
    """Raised for a call that svod does not run; nothing has been written yet."""


def _refuse(*_: Any) -> list[Any]:
    raise _Refused


def _compiled(gm: Any, example_inputs: Sequence[Any], name: str, settings: Settings) -> Any:
    """Compile the graph through AOT autograd, whose functional graphs become GraphFunctions. If svod refuses a call, PyTorch runs
    Dynamo's original graph, not the functional one, because only the former is right for arguments that share memory."""
    def compiler(functional: Any, fake_inputs: Sequence[Any]) -> Any:
        program = AtenProgram(name, functional.graph, attributes_of(functional), {})
        return boxed(GraphFunction(program, *static_arguments(functional), _refuse, settings, ENTRY))
    keep_whole(gm)
    compiled = aot_autograd(fw_compiler=compiler, inference_compiler=compiler, decompositions=decompositions(),
                            keep_inference_input_mutations=True)(gm, example_inputs)

    def run(*args: Any) -> Any:
        try:
            return compiled(*args)
        except _Refused:
            return gm.forward(*args)
    return run


def boxed(function: GraphFunction) -> Callable[[list[Any]], list[Any]]:
    """A function that takes its arguments in a list and empties it, which is the calling convention of AOT autograd."""
    def call(args: list[Any]) -> list[Any]:
        given = list(args)
        args.clear()
        return function(given)
    call._boxed_call = True     # type: ignore[attr-defined]
    return call


def cannot(inputs: Sequence[Any]) -> str | None:
    """The reason why svod cannot run a graph of these inputs; None if it can."""
    tensors = [t for t in inputs if isinstance(t, torch.Tensor)]
    if torch.is_grad_enabled() and any(t.requires_grad for t in tensors):
        return NEEDS_GRADIENTS
    for t in tensors:
        if t.device.type not in ("cpu", "cuda"):
            return f"it has tensors on {t.device}; svod compiles for the CPU and CUDA"
        if not is_representable(t):
            return f"it has {str(t.dtype if t.layout is torch.strided else t.layout).removeprefix('torch.')} tensors"
    return None


def static_arguments(functional: Any) -> tuple[list[int], list[int]]:
    """Numbers of a functional graph's arguments that belong to a module: (unchanged weights, tensors that the graph writes)."""
    context = TracingContext.try_get()
    metadata = context.fw_metadata if context is not None else None
    if metadata is None:
        return [], []
    written = {n.args[0] for n in functional.graph.nodes if n.op == "call_function" and str(n.target) == "aten.copy_.default"}
    placeholders = [n for n in functional.graph.nodes if n.op == "placeholder"]
    returned = set(next(n for n in functional.graph.nodes if n.op == "output").args[0])
    static = [i for i in metadata.static_input_indices
              if i < len(placeholders) and isinstance(placeholders[i].meta.get("val"), torch.Tensor)]
    return [i for i in static if placeholders[i] not in written | returned], [i for i in static if placeholders[i] in written]


def name_of(gm: Any) -> str:
    """The user's function that a graph comes from, and where it begins: "forward (model.py:12)"; for one of PyTorch's modules, its
    class."""
    for node in gm.graph.nodes:
        entries = [line.strip() for line in (node.meta.get("stack_trace") or "").splitlines() if line.strip().startswith("File ")]
        if entries:
            return f"{entries[0].rsplit(', in ', 1)[-1]} ({place_of_entry(entries[0])})"
    outermost = [next(iter(stack.values()))[1] for n in gm.graph.nodes if (stack := n.meta.get("nn_module_stack"))]
    return str(getattr(outermost[0], "__name__", outermost[0])) if outermost else "a graph"


_watch(callback_handler.register_start_callback, _before_tracing)
_watch(callback_handler.register_end_callback, _after_tracing)
