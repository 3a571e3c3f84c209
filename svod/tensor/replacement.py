"""Computed values in the place of the nodes that compute them, in every live tensor.

    a = x + y             a: ADD                    thread 1 computes a
    b = (x + y) * z       b: MUL(ADD, z)            thread 2 computes b, from MUL(ADD, z)
    thread 1 is done:     a: BUFFER 1               b: MUL(BUFFER 1, z), another node than the one thread 2 started from
    thread 2 is done:     b: BUFFER 2               its record `Computing` knows what became of MUL(ADD, z)

An assignment is made once: a thread that needs its result waits for the thread that computes it.
"""
from __future__ import annotations

import sys
import threading
from collections.abc import Mapping, Sequence
from types import TracebackType
from typing import Self

from svod.core.graph import graph
from svod.core.graph.storage import base_of, content_under, is_kernel_store
from svod.core.graph.traits import EFFECTS, traits_of
from svod.core.ir.origin import inherit_origin
from svod.core.ir.uop import Ops, UOp
from svod.system.forksafe import remake_after_fork
from svod.system.monitor import Monitor
from svod.tensor.base import TensorBase, pending_tensors

_replacing = Monitor(threading.Lock())      # notified when a record ends
_computing: dict[int, Computing] = {}       # records of values that threads compute now, by id; read and written under the lock
remake_after_fork(sys.modules[__name__], "_replacing", lambda: Monitor(threading.Lock()))
remake_after_fork(sys.modules[__name__], "_computing", dict)    # the other threads do not exist in the child


class Computing:
    """A context in which a thread computes tensors. It knows what other threads replace the tensors' nodes by meanwhile. It begins when no
    other thread makes an assignment that the tensors need; with `only_pending` it leaves out those that are in memory by then."""

    __slots__ = ("_contents", "_given", "_now", "_only_pending", "_thread", "roots", "tensors")
    tensors: list[TensorBase]   # the tensors that this thread computes
    roots: list[UOp]            # the tensors' nodes at the start
    _contents: frozenset[UOp]   # AFTERs under the roots
    _now: dict[UOp, UOp]        # base of a root, or AFTER under it: node that stands for it now

    def __init__(self, tensors: Sequence[TensorBase], *, only_pending: bool = False) -> None:
        self._given, self._only_pending, self._thread = tensors, only_pending, threading.get_ident()

    def __enter__(self) -> Self:
        with _replacing.lock:
            _replacing.wait_for(self._may_begin)
            self._now = {u: u for u in (*map(base_of, self.roots), *self._contents)}
            _computing[id(self)] = self
        return self

    def _may_begin(self) -> bool:
        """Whether no other thread makes an assignment under the tensors' nodes, which are read here; under the lock."""
        found = [(t, t.uop) for t in self._given]
        found = [(t, root) for t, root in found if not self._only_pending or base_of(root).op is not Ops.BUFFER]
        self.tensors, self.roots = [t for t, _ in found], [root for _, root in found]
        has_effects = any(traits_of(r) & EFFECTS for r in self.roots)
        self._contents = frozenset(graph.sink(*self.roots).walk(Ops.AFTER)) if has_effects else frozenset()
        return not self._contents or all(c._thread == self._thread or self._contents.isdisjoint(c._contents) for c in _computing.values())

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        with _replacing.lock:
            _computing.pop(id(self), None)
            _replacing.notify_all()

    def replace(self, computed: Mapping[UOp, UOp], *, takes_over: bool = False) -> None:
        """Replace nodes in every live tensor. `computed`: bases of the roots, and AFTERs under them, to views of memory. What another
        thread has computed meanwhile stays; with `takes_over` the tensors of this record read the views even then. A tensor that was
        assigned to keeps its new node."""
        with _replacing.lock:
            now = {self._now[u]: value for u, value in computed.items()}
            if pending := {u: value for u, value in now.items() if base_of(u).op is not Ops.BUFFER}:
                _replace(pending)
            for t, root in zip(self.tensors, self.roots, strict=True) if takes_over else ():
                base = base_of(root)
                if base in computed and base_of(t.uop) is base_of(self._now[base]):
                    t.uop = root.substitute({base: computed[base]})

    def follow(self, done: Mapping[UOp, UOp]) -> None:
        """Note that `done` replaces nodes; under the lock."""
        self._now = {u: done[now] for u, now in self._now.items()}

    def nodes(self) -> list[UOp]:
        """The nodes that stand for the roots now; under the lock."""
        return list(self._now.values())


def replace_nodes(mapping: Mapping[UOp, UOp]) -> None:
    """Replace nodes in every live tensor. Each value must have the shape and dtype of its key. The replacement does not descend into
    values."""
    if mapping:
        with _replacing.lock:
            _replace(mapping)


def _replace(mapping: Mapping[UOp, UOp]) -> None:
    """Only one thread at a time does this. A tensor that is assigned to in the meantime keeps its new node."""
    held = [(t, t.uop) for t in pending_tensors()]
    computing = list(_computing.values())
    done: dict[UOp, UOp] = {}
    nodes = {u: None for _, u in held} | {u: None for c in computing for u in c.nodes()}
    for u in graph.sink(*nodes).toposort(gate=lambda n: n not in mapping):
        if u in mapping:
            done[u] = mapping[u]
        elif u.op is not Ops.SINK:
            assigns = u.op is Ops.ASSIGN or (u.op is Ops.STORE and not is_kernel_store(u))
            src = _assigned(u, done) if assigns else tuple([done[s] for s in u.src])
            if src == u.src:
                done[u] = u
            else:
                done[u] = u.replace(src=src)
                inherit_origin(done[u], u)
    for c in computing:
        c.follow(done)
    for t, u in held:
        if t.uop is u:
            t.uop = done[u]


def _assigned(assign: UOp, done: Mapping[UOp, UOp]) -> tuple[UOp, UOp]:
    """The new target and value of an ASSIGN or STORE. The target denotes memory: it stays a view of the memory that is assigned to, even
    if the view was also computed as a value."""
    target, value = assign.src
    content = content_under(target)
    assert content is not None
    return target.substitute({content: done[content]}), done[value]
