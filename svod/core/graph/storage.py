"""The memory under a graph node: the BUFFER behind a view, and the versions of its content after assignments."""
from __future__ import annotations

from svod.core.ir.uop import MOVEMENT, Ops, UOp
from svod.core.ir.variable import is_symbolic, layout_shape


def content_under(view: UOp) -> UOp | None:
    """Return the BUFFER or AFTER behind a `view` that shows each element at most once; None for any other node."""
    while _shows_once(view):
        view = view.src[0]
    return view if view.op in (Ops.BUFFER, Ops.AFTER) else None


def _shows_once(u: UOp) -> bool:
    """Whether u is a view that shows elements of its source, none of them twice."""
    if u.op is Ops.WINDOW:
        return all(dilation * (size - 1) < stride for _, size, stride, dilation in u.arg)
    return u.op is Ops.DETACH or (u.op in MOVEMENT and u.op not in (Ops.EXPAND, Ops.PAD))


def unassignable(view: UOp) -> str:
    """Return the name of the operation that makes a view unassignable."""
    while _shows_once(view):
        view = view.src[0]
    return view.op.value


def storage_of(content: UOp) -> UOp:
    """Return the BUFFER of a BUFFER or AFTER, which denotes a version of its content."""
    storage, _ = history_of(content)
    return storage


def is_made_anew(storage: UOp) -> bool:
    """Whether each computation of the content of a BUFFER gets new memory for it."""
    return storage.src[0].op is Ops.LUNIQUE


def history_of(content: UOp) -> tuple[UOp, int]:
    """(storage, how many AFTERs led to this content). Remembered on the node."""
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
    """The node under the RESHAPEs and DETACHes of u, and under a `storage_view`: the BUFFER of a realised tensor, the AFTER of one that
    was assigned to, or the node that computes it."""
    while u.op is Ops.RESHAPE or u.op is Ops.DETACH or is_padding_view(u):
        u = u.src[0]
    return u


def is_padding_view(u: UOp) -> bool:
    """Whether u is the used part of a buffer that has room for the largest shape, or of what an assignment leaves of one."""
    return (u.op is Ops.SHRINK and is_symbolic([e for _, e in u.arg]) and u.src[0].op is Ops.RESHAPE
            and u.src[0].src[0].op in (Ops.BUFFER, Ops.AFTER)
            and all(type(b) is int and b == 0 for b, _ in u.arg)
            and u.src[0].arg == layout_shape([e for _, e in u.arg]))


def is_kernel_store(u: UOp) -> bool:
    """Whether u is a STORE of a kernel, to an element of a PARAM. Under an AFTER it orders nothing: whoever calls the kernel does."""
    return u.op is Ops.STORE and bool(u.src) and u.src[0].op is Ops.INDEX and u.src[0].src[0].op is Ops.PARAM
