"""Three bits that say what kinds of nodes lie below a graph node, cached on it: a pass that finds nothing there skips the graph."""
from __future__ import annotations

from svod.core.graph.callback import is_callback
from svod.core.ir.uop import Ops, UOp, remembered
from svod.core.ir.variable import Dim

HAS_BUFFERS = 1     # reads a BUFFER: the same computation over other buffers is a different node
EFFECTS = 2         # contains an assignment or a call: computing the node writes memory or runs Python
VARIABLES = 4       # contains a variable, possibly in a shape

_EFFECTS = frozenset({Ops.AFTER, Ops.ASSIGN, Ops.STORE, Ops.CALL, Ops.CUSTOM_FUNCTION, Ops.END, Ops.PROGRAM})
_VARIABLES = frozenset({Ops.DEFINE_VAR, Ops.BIND})


@remembered("traits")
def traits_of(u: UOp) -> int:
    """Return the union of HAS_BUFFERS, EFFECTS and VARIABLES over a graph node and all nodes below it."""
    op = u.op
    traits = HAS_BUFFERS if op is Ops.BUFFER or op is Ops.UNIQUE or op is Ops.LUNIQUE else 0
    if op in _EFFECTS or is_callback(u):
        traits |= EFFECTS
    if op in _VARIABLES or (type(u.arg) is tuple and _has_dim(u.arg)):
        traits |= VARIABLES
    for s in u.src:
        traits |= traits_of(s)
    return traits


def _has_dim(arg: tuple[object, ...]) -> bool:
    return any(isinstance(a, Dim) or (type(a) is tuple and _has_dim(a)) for a in arg)
