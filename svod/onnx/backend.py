"""svod as an ONNX backend, the interface used by `onnx.backend.test` and the backend scoreboard.

    import onnx.backend.test, svod.onnx.backend
    onnx.backend.test.BackendTest(svod.onnx.backend, __name__)
"""
from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import onnx
from onnx.backend.base import Backend, BackendRep

from svod.onnx.model import Model, load


class SvodRep(BackendRep):
    """A prepared model."""

    def __init__(self, model: Model) -> None:
        self.model = model

    def run(self, inputs: Any, **kwargs: Any) -> tuple[Any, ...]:
        given = inputs if isinstance(inputs, (list, tuple)) else [inputs]
        results = self.model(*given)
        return results if isinstance(results, tuple) else (results,)


class SvodBackend(Backend):
    """svod's implementation of ONNX's backend interface."""

    @classmethod
    def prepare(cls, model: onnx.ModelProto, device: str = "CPU", **kwargs: Any) -> SvodRep:
        return SvodRep(load(model))

    @classmethod
    def run_model(cls, model: onnx.ModelProto, inputs: Any, device: str = "CPU", **kwargs: Any) -> tuple[Any, ...]:
        return cls.prepare(model, device).run(inputs)

    @classmethod
    def run_node(cls, node: onnx.NodeProto, inputs: Any, device: str = "CPU", outputs_info: Sequence[Any] | None = None,
                 **kwargs: Any) -> tuple[Any, ...]:
        arrays = [np.asarray(x) for x in inputs]
        infos = [onnx.helper.make_tensor_value_info(n, onnx.helper.np_dtype_to_tensor_dtype(a.dtype), a.shape)
                 for n, a in zip(filter(None, node.input), arrays, strict=True)]
        graph = onnx.helper.make_graph([node], "node", infos, [onnx.helper.make_empty_tensor_value_info(o) for o in node.output if o])
        return cls.run_model(onnx.helper.make_model(graph), arrays, device)

    @classmethod
    def supports_device(cls, device: str) -> bool:
        return device.split(":")[0] == "CPU"


prepare, run_model, run_node, supports_device = (SvodBackend.prepare, SvodBackend.run_model, SvodBackend.run_node,
                                                 SvodBackend.supports_device)
