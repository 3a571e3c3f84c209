"""Origins of graph nodes: the module path or the line of user code that made a node.

An origin is an annotation and not part of a node's identity: the same expression written twice is one node, which keeps the origin that was
recorded first. Tensor operations record origins; the pass that cuts a graph into kernels, and reports, read them.
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

# operations whose nodes many expressions share: the origin of one expression would be wrong for the others
_SHARED = frozenset({Ops.BUFFER, Ops.CONST, Ops.IOTA})


@contextmanager
def scope(path: str) -> Iterator[None]:
    """Set the origin of the nodes that are made in the body to the module `path`. Paths of nested scopes are joined by a dot.

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
    """Record the current scope or line of user code as the origin of `node`, and of the chain of first operands below it up to the first
    node that has an origin."""
    if node.op in _SHARED or "origin" in node.remarks:
        return
    origin: str | tuple[str, int] | None = _scope.get() or _caller()
    if origin is None:
        return
    while True:
        node.remarks["origin"] = origin     # `origin_of` formats it
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
    """Return the origin of a node as text: `"layer1.0.conv1"`, or `"model.py:12"` with the path as Python reports it (a byte that is not
    UTF-8 appears as `\\udcff`). None for a node without a recorded origin."""
    origin = node.remarks.get("origin")
    if origin is None:
        return None
    text = ":".join(map(str, origin)) if isinstance(origin, tuple) else origin
    return text if text.isascii() else text.encode("utf-8", "backslashreplace").decode()


def _caller() -> tuple[str, int] | None:
    """Return (file, line) of the innermost stack frame outside this package; None if there is none."""
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
