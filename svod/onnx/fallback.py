"""Runs nodes that svod lacks, and all nodes that depend on them, with another runtime on the host.

    load("detector.onnx", fallback="onnxruntime")

A detector ends with NonMaxSuppression, whose result has as many rows as there are boxes: svod computes all nodes before it, and the other
runtime computes the rest, the tail, from the plan's outputs. The tail is determined when the model is loaded, and again if a node is
refused because of values at the first call with a signature. A warning tells the tail's share of the nodes.
"""
from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from typing import Any

import onnx

from svod.errors import ConfigError, UnsupportedError
from svod.onnx.reader import Arrays, in_order, needed_for, opsets, overridable, reads
from svod.onnx.registry import Array

log = logging.getLogger("svod.onnx")

RUNTIMES = ("onnxruntime", "reference")


class RuntimeTail:
    """The nodes of a model that another runtime computes. `cut`: names of the values that svod computes for it; `results`: names of the
    model's outputs that it computes."""

    def __init__(self, model: onnx.ModelProto, arrays: Arrays, lacking: Sequence[str], outputs: Sequence[str], runtime: str) -> None:
        """Determine the tail. `arrays`: the arrays of the model's tensors. `lacking`: the first output of each node that svod lacks."""
        graph = model.graph
        behind: set[str] = set()
        nodes = []
        for node in in_order(graph):
            if any(o in lacking for o in node.output) or behind.intersection(reads(node)):
                nodes.append(node)
                behind.update(o for o in node.output if o)
        self.results = [o for o in outputs if o in behind]
        nodes = needed_for(self.results, nodes)
        made = {o for n in nodes for o in n.output}
        changeable = set(overridable(model))
        constants = {t.name: t for t in graph.initializer if t.name not in changeable}
        read = [name for n in nodes for name in reads(n) if name and name not in made]
        self.cut = [name for name in dict.fromkeys(read) if name not in constants]
        self.share = len(nodes) / max(1, len(graph.node))
        self.operators = sorted({n.op_type for n in nodes if any(o in lacking for o in n.output)})
        shape_free = [onnx.helper.make_empty_tensor_value_info(name) for name in self.results]
        self._nodes, self._constants = nodes, [constants[name] for name in dict.fromkeys(read) if name in constants]
        self._outputs, self._versions, self._runtime = shape_free, opsets(model), runtime
        self._arrays = arrays
        self._runs: dict[tuple[Any, ...], Any] = {}

    def run(self, values: Mapping[str, Array]) -> dict[str, Array]:
        """The outputs of the tail for values at the cut. Raises UnsupportedError if the other runtime refuses the tail."""
        signature = tuple((name, values[name].dtype.str, values[name].ndim) for name in self.cut)
        run = self._runs.get(signature)
        if run is None:
            run = self._runs[signature] = self._session(values)
        return dict(zip(self.results, run(self.results, {name: values[name] for name in self.cut}), strict=True))

    def _session(self, values: Mapping[str, Array]) -> Any:
        infos = [onnx.helper.make_tensor_value_info(name, onnx.helper.np_dtype_to_tensor_dtype(values[name].dtype),
                                                    [None] * values[name].ndim)
                 for name in self.cut]
        graph = onnx.helper.make_graph(self._nodes, "tail", infos, self._outputs, self._constants)
        model = onnx.helper.make_model(graph, opset_imports=[onnx.helper.make_opsetid(d, v) for d, v in self._versions.items()],
                                       ir_version=8)
        model = self._arrays.whole(model)
        try:
            if self._runtime == "reference":
                from onnx.reference import ReferenceEvaluator
                return ReferenceEvaluator(model).run
            import onnxruntime
            return onnxruntime.InferenceSession(model.SerializeToString(), providers=["CPUExecutionProvider"]).run
        except ImportError as e:
            raise UnsupportedError(f"fallback={self._runtime!r}: {e}; pip install onnxruntime, or use fallback=\"reference\"") from None
        except Exception as e:  # each runtime has its own error types
            raise UnsupportedError(f"fallback={self._runtime!r} refuses the nodes behind {', '.join(self.operators)}: {e}") from e


def check_runtime(name: str | None, argument: str = "fallback") -> None:
    """Raise ConfigError for a name that is not in RUNTIMES."""
    if name is not None and name not in RUNTIMES:
        raise ConfigError(f"{argument}={name!r}: use {' or '.join(map(repr, RUNTIMES))}, or None")
