"""ONNX Runtime on the CPU. onnx.helper makes a model of the case, and a session optimises it; inputs and outputs are bound once.

Weights become initializers, which the session may pack.
"""
from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import onnxruntime as ort

from svod.bench.peers import Array, PreparedPeer, calls
from svod.bench.peers.onnx_models import TYPES, Draw, build_model, model_file
from svod.bench.suites.cases import Case
from svod.core.graph.buffer import bfloat16_bits_to_float32
from svod.errors import UnsupportedError

NOT_THERE = ("NOT_IMPLEMENTED", "Type Error", "INVALID_GRAPH")      # words in a session's error that mean that an operation has no kernel


class OnnxRuntimePeer:
    """ONNX Runtime as a peer. An operation uses `threads` threads. They stop spinning when a run ends, so that they do not take cores
    from the next contestant."""

    name = "onnxruntime"
    version = str(ort.__version__)
    outputs = "bound once, reused"

    def __init__(self, threads: int) -> None:
        self.threads = threads
        ort.set_default_logger_severity(4)

    def prepare(self, case: Case, operands: Sequence[Array]) -> PreparedPeer:
        if case.alone:
            with model_file(case, operands) as (source, draw):
                return self._prepare_file(source, draw)
        session = self._session(build_model(case, operands).SerializeToString(), spinning=False)
        binding = session.io_binding()
        kept = []
        for i, (a, o) in enumerate(zip(operands, case.operands, strict=True)):
            if not o.weight:
                binding.bind_input(f"x{i}", "cpu", 0, TYPES[o.dtype], a.shape, a.ctypes.data)
                kept.append(a)
        out = np.zeros(case.out_shape, np.uint16 if case.out_dtype == "bfloat16" else case.out_dtype)
        kept.append(out)
        binding.bind_output("y", "cpu", 0, TYPES[case.out_dtype], out.shape, out.ctypes.data)

        def run() -> None:
            session.run_with_iobinding(binding)
            kept[:1] = kept[:1]         # a reference to `kept`, so that this closure keeps the bound arrays alive
        return PreparedPeer(calls(run), lambda: bfloat16_bits_to_float32(out) if case.out_dtype == "bfloat16" else out, True)

    def _prepare_file(self, source: str | bytes, draw: Draw) -> PreparedPeer:
        """A session of a file, called as its users do: arrays in, new arrays out. `draw` makes the inputs from their names, ranks and
        types."""
        session = self._session(source, spinning=True)
        feed = draw([(i.name, len(i.shape), i.type == "tensor(float)") for i in session.get_inputs()])
        last: list[Any] = []

        def run() -> None:
            last[:] = session.run(None, feed)
        return PreparedPeer(calls(run), lambda: list(last), False)

    def _session(self, model: str | bytes, *, spinning: bool) -> Any:
        """A session of a file, given by path or content. `spinning`: whether its threads spin between runs, as is the default."""
        options = ort.SessionOptions()
        options.intra_op_num_threads = self.threads
        options.inter_op_num_threads = 1
        options.graph_optimization_level = ort.GraphOptimizationLevel.ORT_ENABLE_ALL
        options.log_severity_level = 4
        if not spinning:
            options.add_session_config_entry("session.force_spinning_stop", "1")
        try:
            return ort.InferenceSession(model, options, providers=["CPUExecutionProvider"])
        except Exception as e:      # the library's own errors have no common base class
            text = " ".join(str(e).split())
            if any(word in text for word in NOT_THERE):
                raise UnsupportedError(f"ONNX Runtime does not run this on the CPU: {text:.120}") from None
            raise
