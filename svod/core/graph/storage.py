"""The storage of graph nodes: the BUFFER of which a node is a view, and the versions of its content after assignments."""
from __future__ import annotations

from svod.core.ir.uop import MOVEMENT, Ops, UOp
from svod.core.ir.variable import is_symbolic, layout_shape


def content_under(view: UOp) -> UOp | None:
    """Return the BUFFER or AFTER of which `view` is a view without repeated elements; None if it is no such view."""
    while _shows_once(view):
        view = view.src[0]
    return view if view.op in (Ops.BUFFER, Ops.AFTER) else None


def _shows_once(u: UOp) -> bool:
    """Whether u is a view each of whose elements is a different element of its source."""
    if u.op is Ops.WINDOW:
        return all(dilation * (size - 1) < stride for _, size, stride, dilation in u.arg)
    return u.op is Ops.DETACH or (u.op in MOVEMENT and u.op not in (Ops.EXPAND, Ops.PAD))


def unassignable(view: UOp) -> str:
    """Return the name of the operation that makes a view unassignable."""
    while _shows_once(view):
        view = view.src[0]
    return view.op.value


def storage_of(content: UOp) -> UOp:
    """Return the BUFFER under a BUFFER or AFTER; an AFTER denotes a later version of the BUFFER's content."""
    storage, _ = history_of(content)
    return storage


def is_made_anew(storage: UOp) -> bool:
    """Whether each computation of the content of a BUFFER gets new memory for it."""
    return storage.src[0].op is Ops.LUNIQUE


def history_of(content: UOp) -> tuple[UOp, int]:
    """Return (the BUFFER, the number of AFTERs between it and `content`). Cached on the node."""
    later: list[UOp] = []
    node = content
    while node.op is Ops.AFTER and not (node._cache and "history" in node._cache):
        later.append(node)
        node = node.src[0]
    storage, number = node._cache["history"] if node._cache and "history" in node._cache else (node, 0)
    for node in reversed(later):
        number += 1
        node.cached("history", lambda _, history=(storage, number): history)  # type: ignore[misc]
    return storage, number


def base_of(u: UOp) -> UOp:
    """Return the node under the RESHAPEs, DETACHes and `storage_view`s of u: the BUFFER of a realised tensor, the AFTER of a tensor that
    was assigned to, or the node that computes the value."""
    while u.op is Ops.RESHAPE or u.op is Ops.DETACH or is_padding_view(u):
        u = u.src[0]
    return u


def is_padding_view(u: UOp) -> bool:
    """Whether u is the used part of a BUFFER or AFTER that has room for the largest shape of a symbolic shape (`graph.storage_view`)."""
    return u.op is Ops.SHRINK and bool(u.cached("padding view", _is_padding_view))


def _is_padding_view(u: UOp) -> bool:
    return (is_symbolic([e for _, e in u.arg]) and u.src[0].op is Ops.RESHAPE
            and u.src[0].src[0].op in (Ops.BUFFER, Ops.AFTER)
            and all(type(b) is int and b == 0 for b, _ in u.arg)
            and u.src[0].arg == layout_shape([e for _, e in u.arg]))


def is_kernel_store(u: UOp) -> bool:
    """Whether u is a STORE of the kernel level, which writes an element of a PARAM. Under an AFTER such a STORE implies no order: the
    caller of the kernel orders it."""
    return u.op is Ops.STORE and bool(u.src) and u.src[0].op is Ops.INDEX and u.src[0].src[0].op is Ops.PARAM
