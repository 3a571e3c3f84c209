"""OpenVINO on the CPU, for whole models: ONNX files, or what makes one, compiled for the shapes of their inputs and for least latency.

By itself OpenVINO computes float32 models in bfloat16 on processors that multiply matrices of it. Here it is told which type to use:
`openvino` computes in float32, `openvino_bf16` in bfloat16.
"""
from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import openvino as ov

from svod.bench.peers import Array, PreparedPeer, calls
from svod.bench.peers.onnx_models import model_file
from svod.bench.suites.cases import Case
from svod.errors import UnsupportedError

BFLOAT16_CAPABILITY = "BF16"               # among a device's capabilities: its processor has instructions for bfloat16
LACKING_WORDS = ("does not support", "not supported", "No translator")      # words in its errors that mean that an operation is missing


class OpenVinoPeer:
    """OpenVINO as a peer. An inference uses `threads` threads."""

    name = "openvino"
    version = str(ov.__version__)
    outputs = "new arrays every run"
    precision = "f32"

    def __init__(self, threads: int) -> None:
        self.threads = threads
        self.core = ov.Core()

    def prepare(self, case: Case, operands: Sequence[Array]) -> PreparedPeer:
        self.check_processor()
        with model_file(case, operands) as (source, draw):
            model: Any = _named_if_missing(lambda: self.core.read_model(source))
        feed = draw([(i.any_name, i.partial_shape.rank.get_length(), i.element_type == ov.Type.f32) for i in model.inputs])
        model.reshape({name: list(a.shape) for name, a in feed.items()})
        options = {"INFERENCE_PRECISION_HINT": self.precision, "PERFORMANCE_HINT": "LATENCY", "INFERENCE_NUM_THREADS": self.threads}
        compiled: Any = _named_if_missing(lambda: self.core.compile_model(model, "CPU", options))
        last: list[Any] = []

        def run() -> None:
            last[:] = [compiled(feed)]
        return PreparedPeer(calls(run), lambda: list(last[0].to_tuple()), False)

    def check_processor(self) -> None:
        """Raise UnsupportedError if the processor lacks the precision."""


class OpenVinoBf16Peer(OpenVinoPeer):
    """OpenVINO that computes in bfloat16, whatever the model's type is."""

    name = "openvino_bf16"
    precision = "bf16"

    def check_processor(self) -> None:
        if BFLOAT16_CAPABILITY not in self.core.get_property("CPU", "OPTIMIZATION_CAPABILITIES"):
            raise UnsupportedError("this processor has no instructions for bfloat16")


def _named_if_missing(step: Any) -> Any:
    """The result of a step of OpenVINO's. Raises UnsupportedError for an operation that it lacks."""
    try:
        return step()
    except Exception as e:          # the library's own errors have no common base class
        text = " ".join(str(e).split())
        if any(word in text for word in LACKING_WORDS):
            raise UnsupportedError(f"OpenVINO does not run this: {text[-160:]}") from None
        raise
