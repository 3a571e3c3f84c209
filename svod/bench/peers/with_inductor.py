"""torch.compile with PyTorch's own backend, inductor, which turns a module's graph into C++ and needs a C++ compiler."""
from __future__ import annotations

from collections.abc import Sequence

import torch

from svod.bench.peers import Array, PreparedPeer
from svod.bench.peers.with_torch import prepared_module
from svod.bench.suites.cases import Case
from svod.bench.suites.torch_modules import compiled
from svod.errors import UnsupportedError


class InductorPeer:
    """A peer for modules under torch.compile, in its default mode and with static sizes. An operation uses `threads` threads."""

    name = "inductor"
    version = str(torch.__version__)
    outputs = "new tensors every run"

    def __init__(self, threads: int) -> None:
        torch.set_num_threads(threads)

    def prepare(self, case: Case, operands: Sequence[Array]) -> PreparedPeer:
        from torch._inductor import cpp_builder, exc

        if case.op != "torch":
            raise UnsupportedError("torch.compile is for PyTorch modules")
        try:
            cpp_builder.get_cpp_compiler()
        except exc.InvalidCxxCompiler as e:
            raise UnsupportedError("there is no C++ compiler, which torch.compile needs") from e
        return prepared_module(case, compiled)
