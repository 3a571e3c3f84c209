"""From a choice of chain to code: what falls back to the heuristic, and what does not."""
from __future__ import annotations

import logging

import pytest

from svod.compile.host import host_target
from svod.compile.object_cache import ObjectCache
from svod.core.kernel import Kernel
from svod.core.scheduler import Opt
from svod.errors import CompileError, KernelOptError, SvodError
from svod.optimize import Choice, Compiled, Compiler, compile_all
from tests.core.corpus import CORPUS

KERNEL = Kernel(next(iter(CORPUS.values()))())
CHAIN = (Opt("UPCAST", "o0", 2),)


class Refusing(Compiler):
    """Cannot compile one chain."""

    def __init__(self, error: SvodError) -> None:
        super().__init__(host_target(1), ObjectCache(None), 16)
        self.error = error

    def compile(self, kernel: Kernel, choice: Choice) -> Compiled:
        if choice.chain == CHAIN:
            raise self.error
        return super().compile(kernel, choice)


@pytest.mark.parametrize("error", [KernelOptError("no such axis"), CompileError("LLVM says no")])
@pytest.mark.parametrize("source", ["database", "beam"])
def test_a_found_chain_that_cannot_be_compiled_falls_back(error: SvodError, source: str, caplog: pytest.LogCaptureFixture) -> None:
    compiler = Refusing(error)
    with caplog.at_level(logging.WARNING, "svod"):
        found = compile_all({KERNEL.key: KERNEL}, {KERNEL.key: Choice(CHAIN, source, "")}, compiler)[KERNEL.key]
    assert found.source == "heuristic" and found.chain == compiler.heuristic(KERNEL)
    assert str(error) in found.why and str(error) in caplog.text


@pytest.mark.parametrize("error", [KernelOptError("no such axis"), CompileError("LLVM says no")])
def test_a_chain_that_was_asked_for_is_an_error(error: SvodError) -> None:
    with pytest.raises(type(error), match=str(error)):
        compile_all({KERNEL.key: KERNEL}, {KERNEL.key: Choice(CHAIN, "explicit", "")}, Refusing(error))
