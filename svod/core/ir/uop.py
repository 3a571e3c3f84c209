"""UOp, the node type of all IR levels: immutable, hash-consed, with a content digest.

    UOp(op, dtype, src, arg)

Equal (op, dtype, src, arg) give the same Python object, so `is` is structural equality and a graph is a DAG.
`uop.key` is a 128-bit digest of the content, blake2b over a versioned canonical form. It is equal in every process, machine and Python
version. The grammar of each level is in docs/ir.md.
"""
from __future__ import annotations

import dataclasses
import hashlib
import struct
import weakref
from collections.abc import Callable, Iterator
from enum import Enum
from functools import partial, wraps
from operator import methodcaller
from typing import Any, TypeVar

from svod.core.ir.dtype import DType, dtypes

KEY_VERSION = b"svod-uop-1"
T = TypeVar("T")


class Ops(Enum):
    """Operations of all IR levels. A member's value is its name in content digests, so a value must never change."""

    # buffers, arguments, constants
    BUFFER = "BUFFER"; PARAM = "PARAM"; CONST = "CONST"  # noqa: E702
    UNIQUE = "UNIQUE"; LUNIQUE = "LUNIQUE"; DEVICE = "DEVICE"; DEFINE_VAR = "DEFINE_VAR"; BIND = "BIND"  # noqa: E702
    SPECIAL = "SPECIAL"; IOTA = "IOTA"  # noqa: E702
    # movement (graph level)
    RESHAPE = "RESHAPE"; PERMUTE = "PERMUTE"; EXPAND = "EXPAND"; PAD = "PAD"; SHRINK = "SHRINK"; FLIP = "FLIP"  # noqa: E702
    WINDOW = "WINDOW"; GATHER = "GATHER"; REDUCE_AXIS = "REDUCE_AXIS"; CAT = "CAT"  # noqa: E702
    # memory and loops
    INDEX = "INDEX"; LOAD = "LOAD"; STORE = "STORE"; RANGE = "RANGE"; REDUCE = "REDUCE"; STAGE = "STAGE"; GEP = "GEP"  # noqa: E702
    # order and structure
    CONTIGUOUS = "CONTIGUOUS"; COPY = "COPY"; ASSIGN = "ASSIGN"; DETACH = "DETACH"; CALL = "CALL"; AFTER = "AFTER"  # noqa: E702
    END = "END"; SINK = "SINK"; MSELECT = "MSELECT"; MSTACK = "MSTACK"  # noqa: E702
    CUSTOM_FUNCTION = "CUSTOM_FUNCTION"; PROGRAM = "PROGRAM"; LINEAR = "LINEAR"  # noqa: E702
    SOURCE = "SOURCE"; BINARY = "BINARY"  # noqa: E702
    # elementwise: conversions
    CAST = "CAST"; BITCAST = "BITCAST"  # noqa: E702
    # elementwise: one operand
    NEG = "NEG"; ABS = "ABS"; RECIPROCAL = "RECIPROCAL"; SQRT = "SQRT"; FLOOR = "FLOOR"; CEIL = "CEIL"  # noqa: E702
    TRUNC = "TRUNC"; ROUND = "ROUND"; NOT = "NOT"  # noqa: E702
    EXP = "EXP"; EXP2 = "EXP2"; LOG = "LOG"; LOG2 = "LOG2"; SIN = "SIN"; COS = "COS"; ERF = "ERF"; TANH = "TANH"  # noqa: E702
    # elementwise: two operands
    ADD = "ADD"; SUB = "SUB"; MUL = "MUL"; FDIV = "FDIV"; IDIV = "IDIV"; MOD = "MOD"; MAX = "MAX"; MIN = "MIN"  # noqa: E702
    POW = "POW"; AND = "AND"; OR = "OR"; XOR = "XOR"; SHL = "SHL"; SHR = "SHR"  # noqa: E702
    CMPLT = "CMPLT"; CMPLE = "CMPLE"; CMPEQ = "CMPEQ"; CMPNE = "CMPNE"  # noqa: E702
    # elementwise: three operands
    WHERE = "WHERE"; MULACC = "MULACC"  # noqa: E702

    # hash by identity: Enum hashes the name string, which slows the construction of UOps
    __hash__ = object.__hash__


UNARY = frozenset({Ops.NEG, Ops.ABS, Ops.RECIPROCAL, Ops.SQRT, Ops.FLOOR, Ops.CEIL, Ops.TRUNC, Ops.ROUND, Ops.NOT, Ops.EXP,
                   Ops.EXP2, Ops.LOG, Ops.LOG2, Ops.SIN, Ops.COS, Ops.ERF, Ops.TANH})
BINARY_OPS = frozenset({Ops.ADD, Ops.SUB, Ops.MUL, Ops.FDIV, Ops.IDIV, Ops.MOD, Ops.MAX, Ops.MIN, Ops.POW, Ops.AND, Ops.OR,
                        Ops.XOR, Ops.SHL, Ops.SHR, Ops.CMPLT, Ops.CMPLE, Ops.CMPEQ, Ops.CMPNE})
TERNARY = frozenset({Ops.WHERE, Ops.MULACC})
ALU = UNARY | BINARY_OPS | TERNARY
ELEMENTWISE = ALU | {Ops.CAST, Ops.BITCAST}
COMMUTATIVE = frozenset({Ops.ADD, Ops.MUL, Ops.MAX, Ops.MIN, Ops.AND, Ops.OR, Ops.XOR, Ops.CMPEQ, Ops.CMPNE})
COMPARISONS = frozenset({Ops.CMPLT, Ops.CMPLE, Ops.CMPEQ, Ops.CMPNE})
TRANSCENDENTAL = frozenset({Ops.EXP, Ops.EXP2, Ops.LOG, Ops.LOG2, Ops.SIN, Ops.COS, Ops.ERF, Ops.TANH, Ops.POW})
MOVEMENT = frozenset({Ops.RESHAPE, Ops.PERMUTE, Ops.EXPAND, Ops.PAD, Ops.SHRINK, Ops.FLIP, Ops.WINDOW})


def encode(value: Any) -> bytes:
    """Return the canonical bytes of an `arg`, tagged by type: a float by its bits, an enum or dtype by its name, a UOp by its key.

    Raises TypeError for a value that has no stable form."""
    if value is None:
        return b"n"
    if value is True or value is False:
        return b"b1" if value else b"b0"
    if isinstance(value, Enum):
        return b"e" + str(value.value).encode()
    if isinstance(value, int):
        return b"i" + str(value).encode() + b";"
    if isinstance(value, float):
        return b"f" + struct.pack("<d", value)
    if isinstance(value, str):
        raw = value.encode()
        return b"s" + str(len(raw)).encode() + b":" + raw
    if isinstance(value, bytes):
        return b"y" + str(len(value)).encode() + b":" + value
    if isinstance(value, tuple):
        return b"(" + b"".join(encode(v) for v in value) + b")"
    if isinstance(value, DType):
        return b"d" + value.name.encode() + b";"
    if isinstance(value, UOp):
        return b"u" + value.key
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        fields = tuple(getattr(value, f.name) for f in dataclasses.fields(value))
        return b"c" + encode(type(value).__name__) + encode(fields)
    raise TypeError(f"{type(value).__name__} cannot be an arg of a UOp: it has no canonical form")


def intern_arg(value: Any) -> Any:
    """Return a hashable key for `value` that distinguishes values that == treats as equal: 1, 1.0 and True; 0.0 and -0.0; NaN payloads."""
    if isinstance(value, (float, bool)):
        return encode(value)
    if isinstance(value, tuple):
        for v in value:
            if type(v) is not int:
                return tuple([intern_arg(v) for v in value])
    return value


class _Reference(weakref.ref["UOp"]):
    """A weak reference to a node in `_nodes`. `forget()` removes the entry of that node."""

    __slots__ = ("forget",)
    forget: Callable[[], object]


_nodes: dict[tuple[Any, ...], _Reference] = {}      # every live node; key: (op, name of the dtype, src, interned arg)
# The callback of a weak reference is not Python code: a KeyboardInterrupt raised in one would be printed and lost.
_forget = methodcaller("forget")


class UOp:
    """A node of an IR graph. Its fields never change after construction, and constructing equal content returns the same object."""

    __slots__ = ("__weakref__", "_cache", "_key", "arg", "dtype", "op", "src")
    op: Ops
    dtype: DType
    src: tuple[UOp, ...]
    arg: Any
    _key: bytes | None
    _cache: dict[str, Any] | None

    def __new__(cls, op: Ops, dtype: DType = dtypes.void, src: tuple[UOp, ...] = (), arg: Any = None) -> UOp:
        kind = type(arg)
        ident = (op, dtype.name, src, arg if kind is int or kind is str or arg is None else intern_arg(arg))
        known = _nodes.get(ident)
        node = None if known is None else known()
        if node is not None:
            return node
        made = object.__new__(cls)
        made.op, made.dtype, made.src, made.arg, made._key, made._cache = op, dtype, src, arg, None, None
        reference = _Reference(made, _forget)
        reference.forget = partial(_nodes.pop, ident, None)
        while True:     # two threads that build the same node at the same time get the same object
            held = _nodes.setdefault(ident, reference)
            node = held()
            if node is not None:
                return node
            held.forget = int       # The node died but its entry is still there. Its callback must not remove the entry of the new node.
            if _nodes.get(ident) is held:
                _nodes.pop(ident, None)

    def __reduce__(self) -> tuple[Any, ...]:
        order = self.toposort()
        number = {u: i for i, u in enumerate(order)}
        return _of_rows, ([(u.op, u.dtype, [number[s] for s in u.src], u.arg) for u in order],)

    def __copy__(self) -> UOp:
        return self

    def __deepcopy__(self, memo: Any) -> UOp:
        return self

    # -- identity -------------------------------------------------------------------------------
    @property
    def key(self) -> bytes:
        """128-bit content digest (16 bytes), stable across processes and machines."""
        if self._key is None:
            for u in self.toposort():
                if u._key is None:
                    h = hashlib.blake2b(KEY_VERSION, digest_size=16)
                    h.update(u.op.value.encode() + b"|" + u.dtype.name.encode() + b"|" + encode(u.arg) + b"|")
                    for s in u.src:
                        h.update(s._key or s.key)
                    u._key = h.digest()
        assert self._key is not None
        return self._key

    def cached(self, name: str, compute: Callable[[UOp], Any]) -> Any:
        """Return `compute(self)`, cached on the node under `name`. `compute` must depend on the node's content only."""
        remarks = self._cache
        if remarks is None:
            remarks = self._cache = {}
        if name not in remarks:
            remarks[name] = compute(self)
        return remarks[name]

    @property
    def remarks(self) -> dict[str, Any]:
        """Mutable annotations of the node: cached results (`cached`), its storage (`svod.core.graph.buffer`), its origin."""
        if self._cache is None:
            self._cache = {}
        return self._cache

    # -- walking --------------------------------------------------------------------------------
    def toposort(self, gate: Callable[[UOp], bool] | None = None) -> list[UOp]:
        """List this node and all nodes below it, sources first, each once, in a deterministic order. Works without recursion.

        `gate`: the sources of a node u are entered only if `gate(u)` is true; u itself is listed in either case."""
        order: list[UOp] = []
        seen: set[UOp] = set()
        stack: list[UOp | None] = [self]    # None: all sources of the next node on the stack are in `order` by the time it is popped
        place, enter, push, pop = order.append, seen.add, stack.append, stack.pop
        while stack:
            u = pop()
            if u is None:
                place(pop())                # type: ignore[arg-type]
            elif u not in seen:
                enter(u)
                if not u.src or (gate is not None and not gate(u)):
                    place(u)
                else:
                    push(u)
                    push(None)
                    stack += u.src[::-1]
        return order

    def walk(self, *ops: Ops) -> Iterator[UOp]:
        """Yield the nodes of the given operations among this node and all nodes below it, sources first."""
        return (u for u in self.toposort() if u.op in ops)

    def replace(self, **changes: Any) -> UOp:
        """Make a node like this one with some of op, dtype, src, arg replaced."""
        return UOp(changes.get("op", self.op), changes.get("dtype", self.dtype), changes.get("src", self.src), changes.get("arg", self.arg))

    def substitute(self, mapping: dict[UOp, UOp]) -> UOp:
        """Replace every node in `mapping` by its value there and return the new root. Nodes inside the values are not replaced."""
        done: dict[UOp, UOp] = {}
        for u in self.toposort(gate=lambda n: n not in mapping):
            if u in mapping:
                done[u] = mapping[u]
            else:
                src = tuple(done[s] for s in u.src)
                done[u] = u if src == u.src else u.replace(src=src)
        return done[self]

    def __repr__(self) -> str:
        arg = "" if self.arg is None else f" {self.arg!r}"
        return f"<{self.op.value} {self.dtype.name}{arg} ({len(self.src)} src)>"

    # -- building expressions ------------------------------------------------------------------
    @staticmethod
    def const(dtype: DType, value: bool | int | float) -> UOp:
        """Make a scalar constant. The value is converted to the kind of `dtype` first, so 1 and 1.0 give the same node."""
        value = bool(value) if dtype.kind == "b" else float(value) if dtype.is_float else int(value)
        return UOp(Ops.CONST, dtype, (), value)

    def _other(self, x: UOp | int | float | bool) -> UOp:
        return x if isinstance(x, UOp) else UOp.const(self.dtype, x)

    def alu(self, op: Ops, *others: UOp | int | float | bool) -> UOp:
        """Make an elementwise node with this node as first operand (the condition of a WHERE). A comparison has dtype bool, a WHERE the
        dtype of its branches, any other operation the dtype of this node."""
        if op is Ops.WHERE:
            a, b = others
            first = a if isinstance(a, UOp) else b
            assert isinstance(first, UOp), "WHERE needs a UOp in one branch to know its dtype"
            src = (self, first._other(a), first._other(b))
            return UOp(op, first.dtype, src)
        operands: tuple[UOp, ...] = (self, *(self._other(o) for o in others))
        return UOp(op, dtypes.bool if op in COMPARISONS else self.dtype, operands)

    def cast(self, dtype: DType) -> UOp:
        return self if dtype == self.dtype else UOp(Ops.CAST, dtype, (self,))

    def __add__(self, o: UOp | int | float) -> UOp: return self.alu(Ops.ADD, o)
    def __radd__(self, o: int | float) -> UOp: return self._other(o).alu(Ops.ADD, self)
    def __sub__(self, o: UOp | int | float) -> UOp: return self.alu(Ops.SUB, o)
    def __rsub__(self, o: int | float) -> UOp: return self._other(o).alu(Ops.SUB, self)
    def __mul__(self, o: UOp | int | float) -> UOp: return self.alu(Ops.MUL, o)
    def __rmul__(self, o: int | float) -> UOp: return self._other(o).alu(Ops.MUL, self)
    def __truediv__(self, o: UOp | int | float) -> UOp: return self.alu(Ops.FDIV, o)
    def __floordiv__(self, o: UOp | int) -> UOp: return self.alu(Ops.IDIV, o)
    def __mod__(self, o: UOp | int) -> UOp: return self.alu(Ops.MOD, o)
    def __neg__(self) -> UOp: return self.alu(Ops.NEG)
    def __and__(self, o: UOp | bool | int) -> UOp: return self.alu(Ops.AND, o)
    def __or__(self, o: UOp | bool | int) -> UOp: return self.alu(Ops.OR, o)
    def __lt__(self, o: UOp | int | float) -> UOp: return self.alu(Ops.CMPLT, o)
    def __le__(self, o: UOp | int | float) -> UOp: return self.alu(Ops.CMPLE, o)


def _of_rows(rows: list[tuple[Ops, DType, list[int], Any]]) -> UOp:
    """Rebuild a pickled graph from its nodes in topological order, whose sources are given as node numbers; returns the last node. Pickle
    calls it, so that a graph of any depth is pickled without recursion."""
    made: list[UOp] = []
    for op, dtype, src, arg in rows:
        made.append(UOp(op, dtype, tuple([made[s] for s in src]), arg))
    return made[-1]


def remembered(name: str, enters: Callable[[UOp], bool] = lambda u: True) -> Callable[[Callable[[UOp], T]], Callable[[UOp], T]]:
    """Decorate a function of a node that calls itself on the node's sources: results are cached on the nodes under `name` and computed
    sources first. So no call recurses deeply, also for graphs deeper than Python's stack. `enters`: whether a node's sources are computed
    before it; true for all nodes by default."""
    def decorate(infer: Callable[[UOp], T]) -> Callable[[UOp], T]:
        def is_open(u: UOp) -> bool:
            return (u._cache is None or name not in u._cache) and enters(u)

        @wraps(infer)
        def of(u: UOp) -> T:
            if u._cache is None or name not in u._cache:
                for n in u.toposort(gate=is_open):
                    n.cached(name, infer)
            result: T = u.remarks[name]
            return result
        return of
    return decorate


def widens(u: UOp) -> bool:
    """Whether a node converts a value to a wider type."""
    return u.op is Ops.CAST and u.dtype.itemsize > u.src[0].dtype.itemsize
