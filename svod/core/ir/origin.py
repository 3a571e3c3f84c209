"""Origins of graph nodes: a module path, or the user's file and line.

An origin is a remark beside the graph, never part of a node's identity: the same expression written twice is one node and
keeps the origin that was recorded first. Tensor operations record; the kernel cut and reports read.
"""
from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar

from svod.core.ir.uop import Ops, UOp

_PACKAGE = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__)))) + os.sep
_scope: ContextVar[str] = ContextVar("svod_scope", default="")
_internal_files: dict[str, bool] = {}

# nodes that many expressions share: an origin of one would be wrong for the others
_SHARED = frozenset({Ops.BUFFER, Ops.CONST, Ops.IOTA})


@contextmanager
def scope(path: str) -> Iterator[None]:
    """Nodes made inside come from the module `path`; scopes nest, joined by a dot.

    with svod.scope("layer1.0"):
        with svod.scope("conv1"):
            y = x.conv2d(w)          # its origin is "layer1.0.conv1"
    """
    outer = _scope.get()
    token = _scope.set(f"{outer}.{path}" if outer else path)
    try:
        yield
    finally:
        _scope.reset(token)


def record_origin(node: UOp) -> None:
    """Remember that `node`, and the sources below it that have no origin yet along its first operands, was made here."""
    if node.op in _SHARED or "origin" in node.remarks:
        return
    origin: str | tuple[str, int] | None = _scope.get() or _caller()
    if origin is None:
        return
    while True:
        node.remarks["origin"] = origin     # put into words only when asked for
        if not node.src:
            return
        node = node.src[0]
        if node.op in _SHARED or "origin" in node.remarks:
            return


def inherit_origin(node: UOp, old: UOp) -> None:
    """Note that `node` replaces `old` in a rewritten graph: it gets the origin of `old`, unless it has one."""
    origin = old.remarks.get("origin")
    if origin is not None and node.op not in _SHARED:
        node.remarks.setdefault("origin", origin)


def origin_of(node: UOp) -> str | None:
    """`"layer1.0.conv1"` or `"model.py:12"` (the path as Python knows it, with bytes that are not UTF-8 as `\\udcff`), or None for a node
    without a recorded origin."""
    origin = node.remarks.get("origin")
    if origin is None:
        return None
    text = ":".join(map(str, origin)) if isinstance(origin, tuple) else origin
    return text if text.isascii() else text.encode("utf-8", "backslashreplace").decode()


def _caller() -> tuple[str, int] | None:
    """File and line of the innermost frame outside this package; None if there is none."""
    frame = sys._getframe(2)
    while frame is not None:
        file = frame.f_code.co_filename
        internal = _internal_files.get(file)
        if internal is None:
            internal = _internal_files[file] = file.startswith(_PACKAGE)
        if not internal:
            return file, frame.f_lineno
        frame = frame.f_back  # type: ignore[assignment]
    return None
