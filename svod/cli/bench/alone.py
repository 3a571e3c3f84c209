"""The child process of `svod.bench.peers.alone`: it lets one library prepare a case, and runs it when the parent asks, then the next one.

    python -m svod.cli.bench.alone DESCRIPTOR       file descriptor of the pipe to the parent
"""
from __future__ import annotations

import gc
import importlib
import logging
import time
import warnings
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import replace
from multiprocessing.connection import Connection
from typing import Any

import numpy as np

from svod.bench.peers import PEER_LIBRARIES, Array, Peer, PreparedPeer, keep_freed_memory
from svod.bench.peers.alone import Done, Order
from svod.bench.suites.cases import Case
from svod.bench.suites.onnx_files import file_named, fitted
from svod.bench.suites.suites import select_cases
from svod.bench.timer import Contestant
from svod.errors import SvodError, UnsupportedError
from svod.system.process.program import arguments


def main(descriptor: str) -> None:
    """Answer messages until the pipe closes."""
    pipe: Connection[Any, Any] = Connection(int(descriptor))
    with suppress(EOFError):
        order: Order = pipe.recv()
        while True:
            prepared = _prepare(pipe, order)
            order = pipe.recv() if prepared is None else _serve(pipe, prepared)
            del prepared
            gc.collect()        # graphs and modules contain reference cycles


def _prepare(pipe: Connection[Any, Any], order: Order) -> PreparedPeer | None:
    """Prepare a case, run it once and send its outputs. Returns the prepared case; None if that fails."""
    try:
        peer, case = _contestant(order), _resolved(order)
        prepared = peer.prepare(case, case.draw(order.seed))
        prepared.run(1)
        outputs = prepared.output()
        assert isinstance(outputs, list)
        exact = None if prepared.exact is None else prepared.exact()
    except UnsupportedError as e:
        pipe.send(("unsupported", str(e)))
        return None
    except Exception as e:      # the border to other libraries: any exception becomes a record
        pipe.send(("failed", _words(e)))
        return None
    pipe.send(("done", Done([np.array(a) for a in outputs], prepared.remark, prepared.identity, prepared.kernels, prepared.prepare_seconds,
                            prepared.search_seconds, exact)))
    return prepared


def _serve(pipe: Connection[Any, Any], prepared: PreparedPeer) -> Order:
    """Answer the parent's messages about a prepared case until it orders the next case. Returns that order."""
    contestant = Contestant(prepared.run)
    while True:
        message = pipe.recv()
        if isinstance(message, Order):
            return message
        kind, *given = message
        answer: Any = None
        try:
            if kind == "run":
                contestant.run(given[0])
            elif kind == "explain":
                answer = () if prepared.explain is None else prepared.explain()
            else:
                answer = contestant.sample(given[0], given[1], time.perf_counter)
            pipe.send(("done", answer))
        except Exception as e:      # any failure of a contestant is reported through the pipe
            pipe.send(("failed", _words(e)))


def _words(e: Exception) -> str:
    return str(e) if isinstance(e, SvodError) else f"{type(e).__name__}: {' '.join(str(e).split()):.200}"


def _contestant(order: Order) -> Peer:
    keep_freed_memory()
    warnings.simplefilter("ignore", FutureWarning)      # PyTorch warns about its own coming changes
    logging.getLogger("svod.torch").setLevel(logging.ERROR)
    if order.config is not None:
        from svod.cli.bench.contestants import SvodContestant

        return SvodContestant(order.contestant, order.config)
    library = PEER_LIBRARIES[order.contestant]
    made: Peer = getattr(importlib.import_module(library.module), library.peer)(order.threads)
    return made


def _resolved(order: Order) -> Case:
    """The case that an order names, with the options from which this process makes its operands."""
    case = select_cases(order.suite, order.case)[0]
    if not case.alone:
        return case
    if case.op in ("torch", "blocks"):
        return replace(case, options={**case.options, "seed": order.seed})
    file = file_named(case.name)
    path = str(file.find())
    source: str | bytes = path
    if file.random_weights:
        import onnx

        from svod.onnx.run import with_random_weights
        source = with_random_weights(onnx.load(path)).SerializeToString()

    def draw(inputs: Sequence[tuple[str, int, bool]]) -> dict[str, Array]:
        return fitted(file.sizes[0](np.random.default_rng(order.seed)), inputs)
    return replace(case, options={**case.options, "source": source, "draw": draw})


if __name__ == "__main__":
    main(arguments()[0])
