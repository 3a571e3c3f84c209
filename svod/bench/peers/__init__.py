"""Other libraries that compute the cases of the suites. Each has one small file, named after the library.

A peer's `prepare` builds the operation of a case on the given operands and compiles or optimises it as users of the library would. The
output is preallocated if the library allows it. Every peer gets as many threads as svod. A missing library is left out and reported.
"""
from __future__ import annotations

import ctypes
import importlib
import sys
from collections.abc import Callable, Collection, Hashable, Sequence
from dataclasses import dataclass
from importlib import metadata
from importlib.util import find_spec
from typing import Any, NamedTuple, Protocol

import numpy as np

from svod.bench.results import KernelInfo, KernelShare, PeerInfo
from svod.bench.suites.cases import Case
from svod.bench.timer import SPIN_DOWN_SECONDS, Contestant
from svod.errors import ConfigError

Array = np.ndarray[Any, Any]
M_TRIM_THRESHOLD, M_MMAP_MAX = -1, -4       # parameters of mallopt, from malloc.h


@dataclass(frozen=True)
class PreparedPeer:
    """A case, ready to be timed. `run(n)` runs it n times in a row and returns when all runs have ended. `output()` is the result of the
    last run, with bfloat16 as float32. `identity` is equal for two contestants that run the same code, and None if that is unknown.
    `again` prepares the same code on other operands, if the contestant's `prepare` would do more than that. `exact`: the result in
    float64. `explain` times the kernels one by one. `precision` is as in `results.ContestantResult`."""

    run: Callable[[int], None]
    output: Callable[[], Array | list[Array]]
    preallocated: bool
    remark: str = ""
    identity: Hashable = None
    kernels: tuple[KernelInfo, ...] = ()
    prepare_seconds: float | None = None
    search_seconds: float | None = None
    again: Prepare | None = None
    contestant: Contestant | None = None        # a contestant that takes its own samples, in another process
    exact: Callable[[], list[Array]] | None = None
    explain: Callable[[], tuple[KernelShare, ...]] | None = None
    precision: str = ""


Prepare = Callable[[Case, Sequence[Array]], PreparedPeer]


class Peer(Protocol):
    """A contestant of every case. `outputs` tells, in words, whether outputs are preallocated."""

    name: str
    version: str
    outputs: str

    def prepare(self, case: Case, operands: Sequence[Array]) -> PreparedPeer:
        """Prepare a case. Raises UnsupportedError if the library lacks the operation; any other error counts as a failure."""
        ...


class Library(NamedTuple):
    """A peer to import when needed: class `peer` of `module`, called with the number of threads. `needs`: modules that must be
    installed. `suites`: "kernels", for suites that run in one process; the names of suites in `cases.REFERENCE` that it takes part in;
    "model", for the suite models in a process of its own. `spin_seconds`: how long its threads spin after a run, in a process of its
    own. `precision` is as in `results.ContestantResult`."""

    needs: tuple[str, ...]
    module: str
    peer: str
    suites: tuple[str, ...] = ("kernels",)
    spin_seconds: float = SPIN_DOWN_SECONDS
    precision: str = ""


WHOLE_MODELS = ("model", "onnx", "torch")
PEER_LIBRARIES = {
    "numpy": Library(("numpy",), "svod.bench.peers.with_numpy", "NumpyPeer"),
    "torch": Library(("torch",), "svod.bench.peers.with_torch", "TorchPeer", ("kernels", "torch", "blocks")),
    "onnxruntime": Library(("onnxruntime", "onnx"), "svod.bench.peers.with_onnxruntime", "OnnxRuntimePeer", ("kernels", "onnx", "torch"),
                           spin_seconds=50e-3),
    "jax": Library(("jax",), "svod.bench.peers.with_jax", "JaxPeer"),
    "inductor": Library(("torch",), "svod.bench.peers.with_inductor", "InductorPeer", ("torch",)),
    "openvino": Library(("openvino", "onnx"), "svod.bench.peers.with_openvino", "OpenVinoPeer", WHOLE_MODELS),
    "openvino_bf16": Library(("openvino", "onnx"), "svod.bench.peers.with_openvino", "OpenVinoBf16Peer", WHOLE_MODELS,
                             precision="bfloat16"),
    "ncnn": Library(("ncnn", "pnnx", "onnx"), "svod.bench.peers.with_ncnn", "NcnnPeer", WHOLE_MODELS),
}


def parse_peers(text: str) -> list[str]:
    """Names from `text`, joined by commas: "" and "none" give no peers, "all" gives all. Raises ConfigError for an unknown name."""
    names = list(dict.fromkeys(filter(None, (p.strip().lower() for p in text.split(",")))))
    if names == ["none"]:
        return []
    if names == ["all"]:
        return list(PEER_LIBRARIES)
    unknown = [n for n in names if n not in PEER_LIBRARIES]
    if unknown:
        raise ConfigError(f"there is no peer {', '.join(map(repr, unknown))}; the peers are {', '.join(PEER_LIBRARIES)}, or all, or none")
    return names


def load_peers(names: Sequence[str], threads: int, suites: Collection[str] = ("kernels",)) -> tuple[list[Peer], list[PeerInfo]]:
    """The installed peers among `names`, each with `threads` threads, and the facts about every peer in `names` that takes part in
    `suites` (named as in `Library.suites`). A peer that only takes part in suites with separate processes is not imported here."""
    keep_freed_memory()
    peers: list[Peer] = []
    infos: list[PeerInfo] = []
    for name in names:
        library = PEER_LIBRARIES[name]
        if not set(suites) & set(library.suites):
            continue
        missing = lacking(name)
        if missing:
            words = " and ".join(filter(None, (", ".join(missing[:-1]), missing[-1])))
            infos.append(PeerInfo(name, None, f"{words} {'is' if len(missing) == 1 else 'are'} not installed", None, ""))
            continue
        if "kernels" not in suites or "kernels" not in library.suites:
            infos.append(PeerInfo(name, metadata.version(library.needs[0]), None, threads, "returned by each call"))
            continue
        try:
            peer: Peer = getattr(importlib.import_module(library.module), library.peer)(threads)
        except ImportError as e:        # installed but not loadable: another build, a missing system library
            infos.append(PeerInfo(name, None, f"it cannot be imported: {e}", None, ""))
            continue
        peers.append(peer)
        infos.append(PeerInfo(name, peer.version, None, threads, peer.outputs))
    return peers, infos


def lacking(name: str) -> list[str]:
    """The packages that a peer needs and that are not installed; pip knows them by these names."""
    return [m for m in PEER_LIBRARIES[name].needs if find_spec(m) is None]


def suites_in_words(name: str) -> str:
    """The suites that a peer takes part in, for a message."""
    words = {"kernels": "of kernels", "model": "models"}
    return "the suites " + ", ".join(words.get(suite, suite) for suite in PEER_LIBRARIES[name].suites)


def keep_freed_memory() -> None:
    """Make the C library (glibc only) keep freed memory for the rest of the process. By default, earlier allocations decide whether a
    library that returns a new array in every run gets the same pages again, or new ones from the system, which takes a millisecond for
    12 MB. The setting also applies to svod's own large arrays."""
    tell = getattr(ctypes.CDLL(None), "mallopt", None) if sys.platform == "linux" else None
    if tell is not None:
        tell(M_MMAP_MAX, 0)
        tell(M_TRIM_THRESHOLD, 2**31 - 1)


def calls(function: Callable[[], object]) -> Callable[[int], None]:
    """Make `PreparedPeer.run` for a library that cannot repeat a call by itself."""
    def run(times: int) -> None:
        for _ in range(times):
            function()
    return run
