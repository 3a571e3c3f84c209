"""onnxruntime's interface, so that code written for it needs no change: `InferenceSession(path).run(None, {"x": x})`."""
from __future__ import annotations

import inspect
import logging
from collections.abc import Mapping, Sequence
from enum import Enum
from typing import Any, NamedTuple

from svod.config import PrepareConfig
from svod.errors import ArgumentError
from svod.onnx.model import Input, Model, load
from svod.onnx.reader import OnnxError, Source
from svod.onnx.registry import Array

log = logging.getLogger("svod.onnx")

_TYPE_NAMES = {"float32": "float", "float64": "double"}


class NodeArg(NamedTuple):
    """An input or output: its name, its type such as `tensor(float)`, and its shape with numbers, names, and None for free dimensions."""

    name: str
    type: str
    shape: list[Any]


class ModelMetadata(NamedTuple):
    """The metadata of a file."""

    producer_name: str
    graph_name: str
    domain: str
    description: str
    version: int
    custom_metadata_map: dict[str, str]


class SessionOptions:
    """onnxruntime's options. `intra_op_num_threads` is used; all others are accepted and ignored."""

    def __init__(self) -> None:
        self.intra_op_num_threads = 0

    def add_session_config_entry(self, key: str, value: str) -> None:
        log.debug("the session option %s=%s is onnxruntime's own", key, value)


class GraphOptimizationLevel(Enum):
    """onnxruntime's levels of optimisation. svod has a single level and ignores them."""

    ORT_DISABLE_ALL = 0
    ORT_ENABLE_BASIC = 1
    ORT_ENABLE_EXTENDED = 2
    ORT_ENABLE_LAYOUT = 3
    ORT_ENABLE_ALL = 99


class ExecutionMode(Enum):
    """onnxruntime's orders of operators, which are ignored: svod runs kernels in the plan's order."""

    ORT_SEQUENTIAL = 0
    ORT_PARALLEL = 1


def get_available_providers() -> list[str]:
    return ["CPUExecutionProvider"]


def get_device() -> str:
    return "CPU"


class InferenceSession:
    """A model with onnxruntime's interface. `options` are passed to `svod.onnx.load`: dims, fallback, config, ….

    Raises the errors of `load`."""

    def __init__(self, path_or_bytes: Source, sess_options: Any = None, providers: Sequence[Any] | None = None,
                 provider_options: Any = None, **options: Any) -> None:
        _note_providers(providers)
        own = inspect.signature(load).parameters.keys() - {"source"}
        if unknown := sorted(options.keys() - own):
            raise ArgumentError(f"InferenceSession takes no {', '.join(unknown)}; beside onnxruntime's sess_options and providers it takes "
                                f"those of svod.onnx.load: {', '.join(sorted(own))}")
        threads = int(getattr(sess_options, "intra_op_num_threads", 0) or 0)
        if threads > 0:
            options.setdefault("config", PrepareConfig.from_env(threads=threads))
        self._model: Model = load(path_or_bytes, **options)
        self._options = sess_options or SessionOptions()

    def run(self, output_names: Sequence[str] | None, input_feed: Mapping[str, Any], run_options: Any = None) -> list[Array]:
        """The named outputs, or all if `output_names` is None, for inputs by name. Raises OnnxError."""
        names = [o.name for o in self._model.outputs]
        if isinstance(output_names, str) or not isinstance(input_feed, Mapping):
            feed = ", ".join(f"{i.name!r}: …" for i in self._model.inputs)
            raise OnnxError(f"run takes a list of outputs, or None, and the inputs by their names: run(None, {{{feed}}})")
        if unknown := [n for n in output_names or () if n not in names]:
            raise OnnxError(f"the model has no output {', '.join(map(repr, unknown))}; it has {', '.join(names)}")
        results = self._model(input_feed)
        outputs = list(results) if isinstance(results, tuple) else [results]
        return [outputs[names.index(n)] for n in output_names] if output_names else outputs

    def get_inputs(self) -> list[NodeArg]:
        return [_node_arg(i) for i in self._model.inputs]

    def get_outputs(self) -> list[NodeArg]:
        return [_node_arg(o) for o in self._model.outputs]

    def get_overridable_initializers(self) -> list[NodeArg]:
        return [_node_arg(i) for i in self._model.overridable]

    def set_providers(self, providers: Sequence[Any] | None = None, provider_options: Any = None) -> None:
        _note_providers(providers)

    def get_session_options(self) -> Any:
        return self._options

    def get_providers(self) -> list[str]:
        return get_available_providers()

    def get_modelmeta(self) -> ModelMetadata:
        m = self._model.proto
        return ModelMetadata(m.producer_name, m.graph.name, m.domain, m.doc_string, m.model_version,
                             {p.key: p.value for p in m.metadata_props})


def _note_providers(providers: Sequence[Any] | None) -> None:
    """Warn if a requested provider would make onnxruntime run on a device, because svod does not."""
    names = [str(p[0] if isinstance(p, (tuple, list)) else p) for p in providers or ()]
    if others := [n for n in names if n not in get_available_providers()]:
        log.warning('svod: InferenceSession has no %s and runs on the CPU; device="CUDA" or "WEBGPU" is svod\'s own way', ", ".join(others))


def _node_arg(i: Input) -> NodeArg:
    return NodeArg(i.name, f"tensor({_TYPE_NAMES.get(i.dtype, i.dtype)})", list(i.shape or ()))
