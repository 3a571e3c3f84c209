"""Other libraries computing the cases of the suites: one small file each, named after the library.

A peer's `prepare` builds the case's operation over the given operands, with outputs preallocated where the library takes them, and compiles
or optimises it as its users would. Every peer gets as many threads as svod. A library that is not installed is left out, and said to be.
"""
from __future__ import annotations

import ctypes
import importlib
import sys
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from typing import Any, NamedTuple, Protocol

import numpy as np

from svod.bench.results import KernelInfo, PeerInfo
from svod.bench.suites.cases import Case
from svod.errors import ConfigError

Array = np.ndarray[Any, Any]
M_TRIM_THRESHOLD, M_MMAP_MAX = -1, -4       # malloc.h


@dataclass(frozen=True)
class PreparedPeer:
    """A case, ready to be timed. `run(n)` runs it n times back to back and returns when all are done; `output()` is the result of the last
    run, bfloat16 as float32. `identity`: equal for two contestants that run the same code; None: it is not known to be the same. `again`:
    prepares the same code over other operands, where `prepare` of the contestant would do more."""

    run: Callable[[int], None]
    output: Callable[[], Array]
    preallocated: bool
    remark: str = ""
    identity: Hashable = None
    kernels: tuple[KernelInfo, ...] = ()
    prepare_seconds: float | None = None
    search_seconds: float | None = None
    again: Prepare | None = None


Prepare = Callable[[Case, Sequence[Array]], PreparedPeer]


class Peer(Protocol):
    """A contestant of every case. `outputs`: in words, whether outputs are preallocated."""

    name: str
    version: str
    outputs: str

    def prepare(self, case: Case, operands: Sequence[Array]) -> PreparedPeer:
        """Raises UnsupportedError for what the library does not have; any other error counts as its failure."""
        ...


class Library(NamedTuple):
    """The class `peer` of `module` is made with the number of threads. `needs` are the modules that must be installed."""

    needs: tuple[str, ...]
    module: str
    peer: str


LIBRARIES = {
    "numpy": Library(("numpy",), "svod.bench.peers.with_numpy", "NumpyPeer"),
    "torch": Library(("torch",), "svod.bench.peers.with_torch", "TorchPeer"),
    "onnxruntime": Library(("onnxruntime", "onnx"), "svod.bench.peers.with_onnxruntime", "OnnxRuntimePeer"),
    "jax": Library(("jax",), "svod.bench.peers.with_jax", "JaxPeer"),
}


def parse_peers(text: str) -> list[str]:
    """Names joined by commas; "" and "none" are no peers, "all" is all. Raises ConfigError for an unknown one, saying what exists."""
    names = list(dict.fromkeys(filter(None, (p.strip().lower() for p in text.split(",")))))
    if names == ["none"]:
        return []
    if names == ["all"]:
        return list(LIBRARIES)
    unknown = [n for n in names if n not in LIBRARIES]
    if unknown:
        raise ConfigError(f"there is no peer {', '.join(map(repr, unknown))}; the peers are {', '.join(LIBRARIES)}, or all, or none")
    return names


def load_peers(names: Sequence[str], threads: int) -> tuple[list[Peer], list[PeerInfo]]:
    """The peers that are installed, each told to use `threads` threads, and what is to be said about all that were asked for."""
    keep_freed_memory()
    peers: list[Peer] = []
    infos: list[PeerInfo] = []
    for name in names:
        library = LIBRARIES[name]
        missing = [m for m in library.needs if find_spec(m) is None]
        if missing:
            infos.append(PeerInfo(name, None, f"{' and '.join(missing)} {'is' if len(missing) == 1 else 'are'} not installed", None, ""))
            continue
        try:
            peer: Peer = getattr(importlib.import_module(library.module), library.peer)(threads)
        except ImportError as e:        # installed, and cannot be loaded: another build, a missing system library
            infos.append(PeerInfo(name, None, f"it cannot be imported: {e}", None, ""))
            continue
        peers.append(peer)
        infos.append(PeerInfo(name, peer.version, None, threads, peer.outputs))
    return peers, infos


def keep_freed_memory() -> None:
    """Tell the C library to keep what is freed, for the rest of the process. As it is set up, whether a library that returns a new array
    every run gets the same pages again, or has the system make new ones (a millisecond for 12 MB), depends on what was allocated in the
    process before. svod's own large arrays are kept as well. Only glibc can be told."""
    tell = getattr(ctypes.CDLL(None), "mallopt", None) if sys.platform == "linux" else None
    if tell is not None:
        tell(M_MMAP_MAX, 0)
        tell(M_TRIM_THRESHOLD, 2**31 - 1)


def calls(function: Callable[[], object]) -> Callable[[int], None]:
    """`run` of a library that has no way of its own to run something n times."""
    def run(times: int) -> None:
        for _ in range(times):
            function()
    return run
