"""What users of onnxruntime write first, unchanged: `InferenceSession(path).run(None, {"x": x})`."""
from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from svod.config import PrepareConfig
from svod.onnx.model import Input, Model, load
from svod.onnx.reader import OnnxError, Source
from svod.onnx.registry import Array

log = logging.getLogger("svod.onnx")

_TYPE_NAMES = {"float32": "float", "float64": "double"}


class NodeArg(NamedTuple):
    """An input or an output: its name, its type as `tensor(float)`, its shape with names and None for what is free."""

    name: str
    type: str
    shape: list[Any]


class ModelMetadata(NamedTuple):
    """What a file says about itself."""

    producer_name: str
    graph_name: str
    domain: str
    description: str
    version: int
    custom_metadata_map: dict[str, str]


class SessionOptions:
    """Options that onnxruntime has. `intra_op_num_threads` is used; any other is accepted, as svod does what it asks for anyway, or has
    nothing to do with it."""

    def __init__(self) -> None:
        self.intra_op_num_threads = 0


class InferenceSession:
    """A model with onnxruntime's interface."""

    def __init__(self, path_or_bytes: Source, sess_options: Any = None, providers: Sequence[Any] | None = None,
                 provider_options: Any = None, **kwargs: Any) -> None:
        if providers:
            log.debug("providers %s: svod runs on the CPU", providers)
        threads = int(getattr(sess_options, "intra_op_num_threads", 0) or 0)
        self._model: Model = load(path_or_bytes, config=PrepareConfig.from_env(threads=threads) if threads > 0 else None)

    def run(self, output_names: Sequence[str] | None, input_feed: Mapping[str, Any], run_options: Any = None) -> list[Array]:
        """The outputs that are named, or all of them, for inputs by name. Raises OnnxError, ValueError for unknown outputs."""
        results = self._model(dict(input_feed))
        outputs = list(results) if isinstance(results, tuple) else [results]
        names = [o.name for o in self._model.outputs]
        if not output_names:
            return outputs
        if unknown := [n for n in output_names if n not in names]:
            raise OnnxError(f"the model has no output {', '.join(map(repr, unknown))}; it has {', '.join(names)}")
        return [outputs[names.index(n)] for n in output_names]

    def get_inputs(self) -> list[NodeArg]:
        return [_node_arg(i) for i in self._model.inputs]

    def get_outputs(self) -> list[NodeArg]:
        return [_node_arg(o) for o in self._model.outputs]

    def get_providers(self) -> list[str]:
        return ["CPUExecutionProvider"]

    def get_modelmeta(self) -> ModelMetadata:
        m = self._model.proto
        return ModelMetadata(m.producer_name, m.graph.name, m.domain, m.doc_string, m.model_version,
                             {p.key: p.value for p in m.metadata_props})


def _node_arg(i: Input) -> NodeArg:
    return NodeArg(i.name, f"tensor({_TYPE_NAMES.get(i.dtype, i.dtype)})", list(i.shape or ()))
