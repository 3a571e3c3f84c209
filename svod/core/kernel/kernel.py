"""A kernel: its AST, the names of its stages and axes, and the table of its accesses. Grammar: docs/ir.md, section 2.

Opts do not rewrite the AST, except ONLINE and FLATTEN, which create another kernel. A state changes the value of a stage only by inlining
the stages that it reads. `Kernel.resolve(inlined)` substitutes these, once per choice, and analyses every access (affine coefficient per
range, constant, other terms); lowering and the cost model read only these tables."""
from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable
from dataclasses import dataclass, field
from functools import cached_property
from math import gcd, prod
from typing import Any, NamedTuple, TypeVar

from svod.core.graph.library_kernel import library_kernel_of
from svod.core.ir.dtype import DType, dtypes, holds
from svod.core.ir.summation import SumRule, sum_rule
from svod.core.ir.symbolic import extent_of, is_symbolic
from svod.core.ir.uop import ALU, Ops, UOp
from svod.core.schedule.canonical import key_of_canonical
from svod.core.schedule.kernel_variables import kernel_variables
from svod.core.schedule.thread_indices import over_ranges
from svod.errors import CompileError, KernelOptError

T = TypeVar("T")


@dataclass(frozen=True)
class Axis:
    """One RANGE of a stage. `kind`: "o" for an axis of the stage's value, "r" for one that is reduced. `bound`: the extent as an expression
    of variables, or None; `extent` is then its maximum."""

    index: int
    name: str
    stage: int
    kind: str
    extent: int
    node: UOp = field(repr=False)
    bound: UOp | None = field(default=None, repr=False)


@dataclass(frozen=True)
class Stage:
    """A stage of the AST in topological order: a STAGE, or an output STORE (`is_output`)."""

    index: int
    name: str                     # "out", "t1", … for STOREs; "s0", "s1", … for the others
    node: UOp = field(repr=False)
    value: UOp = field(repr=False)
    outs: tuple[int, ...]         # axis indices of the value, outermost first
    reds: tuple[int, ...]         # axis indices of its REDUCEs
    is_output: bool
    dtype: DType
    sum_rule: SumRule | None      # strictest rule for its sums of floats; None if it has none

    @property
    def has_reduce(self) -> bool:
        return bool(self.reds)


def own_reduces(value: UOp) -> list[UOp]:
    """The REDUCE nodes in a stage's value, without those inside other stages."""
    return [u for u in value.toposort(gate=lambda n: n.op is not Ops.STAGE) if u.op is Ops.REDUCE]


def reduce_parts(reduce: UOp) -> tuple[tuple[UOp, ...], tuple[UOp, ...]]:
    """(values, ranges) of a REDUCE node."""
    n = reduce.arg[1]
    return reduce.src[:n], reduce.src[n:]


class Kernel:
    """An analysed kernel AST. `ast` must be canonical (svod.core.schedule.canonical): its key is the kernel's identity."""

    def __init__(self, ast: UOp):
        if ast.op is not Ops.SINK or not ast.src or any(s.op is not Ops.STORE for s in ast.src):
            raise CompileError(f"a kernel is a SINK of STOREs, found {ast!r}; build it with svod.core.schedule.schedule.create_schedule")
        self.ast = ast = over_ranges(ast)
        self.key: str = key_of_canonical(ast)
        nodes = ast.toposort()
        stages = [u for u in nodes if u.op is Ops.STAGE]
        self.params: tuple[UOp, ...] = tuple(sorted((u for u in nodes if u.op is Ops.PARAM), key=lambda u: u.arg.slot))
        if [p.arg.slot for p in self.params] != list(range(len(self.params))):
            raise CompileError(f"kernel parameters must fill slots 0…n-1, found {[p.arg.slot for p in self.params]}")
        self.outs: tuple[int, ...] = tuple(s.src[0].src[0].arg.slot for s in ast.src)
        self.axes: list[Axis] = []
        self.stages: list[Stage] = []
        self.axis_of: dict[UOp, int] = {}
        named = [(f"s{i}", u) for i, u in enumerate(stages)]
        named += [("out" if i == 0 else f"t{i}", u) for i, u in enumerate(ast.src)]
        for name, node in named:
            self._add_stage(name, node)
        self.stage_of: dict[UOp, int] = {s.node: s.index for s in self.stages}
        self.output: int = len(stages)
        self._resolved: dict[frozenset[int], tuple[ResolvedStage | None, ...]] = {}
        self._resolved_stages: dict[tuple[int, frozenset[int]], ResolvedStage] = {}
        # the library kernel node if the kernel consists of one, else None; it has one form, without opts
        self.library_kernel: UOp | None = library_kernel_of(ast)
        self.windows: dict[int, Any] = {}    # stage → `windows_of` of `contraction`, cached for all states
        self.limits: tuple[Any, ...] | None = None      # `masked_limits` of `online`, cached; None: not computed yet
        self._rewritten: dict[tuple[str, str, Hashable], Kernel] = {}       # (op, stage, argument) → `rewritten`, cached
        self.canonical_sums: dict[int, Any] = {}        # stage → `canonical_sum` of `numerics`, cached for all states
        self.attention_weights: dict[frozenset[int], frozenset[tuple[int, int]]] = {}   # inlined stages → `attention_weights`, cached

    def _add_stage(self, name: str, node: UOp) -> None:
        is_output = node.op is Ops.STORE
        value, ranges = (node.src[1], node.src[2:]) if is_output else (node.src[0], node.src[1:])
        prefix = "" if name == "out" else name + "."
        index = len(self.stages)
        reds: tuple[UOp, ...] = ()
        for r in own_reduces(value):
            _, own_reds = reduce_parts(r)
            if reds and own_reds != reds:
                raise CompileError(f"stage {name} has REDUCEs over different ranges; each set needs a STAGE of its own")
            reds = own_reds
        ids: dict[str, list[int]] = {"o": [], "r": []}
        for kind, group in (("o", ranges), ("r", reds)):
            for i, r in enumerate(group):
                if r in self.axis_of:
                    raise CompileError(f"range {r!r} belongs to two stages; give each stage ranges of its own")
                axis = Axis(len(self.axes), f"{prefix}{kind}{i}", index, kind, extent_of(r), r, r.src[0] if is_symbolic(r) else None)
                self.axis_of[r] = axis.index
                self.axes.append(axis)
                ids[kind].append(axis.index)
        rules = [rule for r in own_reduces(value) if (rule := sum_rule(r)) is not None]
        self.stages.append(Stage(index, name, node, value, tuple(ids["o"]), tuple(ids["r"]), is_output, value.dtype,
                                 min(rules, default=None)))

    @cached_property
    def variables(self) -> dict[str, tuple[int, int]]:
        """Bounds of the variables that the kernel is launched with: name → (least, most), sorted by name."""
        return kernel_variables(self.ast)

    @cached_property
    def nbytes(self) -> int:
        """Bytes of all buffers."""
        return sum(p.arg.size * p.dtype.itemsize for p in self.params)

    @cached_property
    def operations(self) -> int:
        """Rough number of operations: half the nodes of each stage, at each of its positions."""
        total = 0
        for r in self.resolve(frozenset()):
            assert r is not None        # nothing is inlined
            total += prod([self.axes[a].extent for a in r.axes]) * max(1, sum(n.kind in ("alu", "load", "read") for n in r.nodes) // 2)
        return total

    @cached_property
    def reads(self) -> tuple[tuple[int, ...], ...]:
        """Per stage, the stages that its value reads directly."""
        result = []
        for s in self.stages:
            own = s.value.toposort(gate=lambda n: n.op is not Ops.STAGE)
            read = {u.src[0] for u in own if u.op is Ops.INDEX and u.src[0].op is Ops.STAGE}
            result.append(tuple(sorted(self.stage_of[u] for u in read)))
        return tuple(result)

    @cached_property
    def axis_by_name(self) -> dict[str, Axis]:
        return {a.name: a for a in self.axes}

    def stage_named(self, name: str) -> Stage:
        """The stage called `name` ("out", "s0", …). Raises KernelOptError."""
        for s in self.stages:
            if s.name == name:
                return s
        raise KernelOptError(f"no stage {name!r}; stages are {', '.join(s.name for s in self.stages)}")

    @cached_property
    def written(self) -> frozenset[int]:
        """Slots of arguments that are both written and read: their loads and stores must keep their order."""
        outs = set(self.outs)
        return frozenset(u.src[0].src[0].arg.slot for u in self.ast.toposort() if u.op is Ops.LOAD and u.src[0].src[0].arg.slot in outs)

    @cached_property
    def dimensions(self) -> tuple[int, ...]:
        """Per axis, a number for its tensor dimension. If a stage reads another one position by position along an axis, both axes share the
        number."""
        number = list(range(len(self.axes)))

        def first(a: int) -> int:
            while number[a] != a:
                a = number[a]
            return a

        for r in self.resolve(frozenset()):
            assert r is not None        # nothing is inlined
            for n in r.nodes:
                if n.kind == "read":
                    for axis, lin in zip(self.stages[n.arg].outs, n.dims, strict=True):
                        for a, c in lin.coefs if len(lin.coefs) == 1 and not lin.const and not lin.atoms else ():
                            if c == 1:
                                number[first(r.axes[a])] = first(axis)
        return tuple(first(a) for a in range(len(self.axes)))

    def rewritten(self, op: str, stage: str, arg: Hashable, rewrite: Callable[[], UOp]) -> Kernel:
        """The kernel that the opt `op` of a stage with this argument exchanges for this one: of the AST that `rewrite` returns. It is made
        once for all states. Raises what `rewrite` raises."""
        known = self._rewritten.get((op, stage, arg))
        if known is None:
            known = self._rewritten[op, stage, arg] = Kernel(rewrite())
        return known

    def resolve(self, inlined: frozenset[int]) -> tuple[ResolvedStage | None, ...]:
        """Per stage, its value with the `inlined` stages substituted and all accesses analysed; None for the inlined stages."""
        resolved = self._resolved.get(inlined)
        if resolved is None:
            resolved = self._resolved[inlined] = tuple(
                None if s.index in inlined else self._resolve_stage(s, inlined) for s in self.stages)
        return resolved

    def _resolve_stage(self, stage: Stage, inlined: frozenset[int]) -> ResolvedStage:
        """`resolve_stage`, once for all states in which the same stages become part of this one."""
        within, todo = set[int](), list(self.reads[stage.index])
        while todo:
            s = todo.pop()
            if s in inlined and s not in within:
                within.add(s)
                todo += self.reads[s]
        key = stage.index, frozenset(within)
        found = self._resolved_stages.get(key)
        if found is None:
            found = self._resolved_stages[key] = resolve_stage(self, stage, key[1])
        return found

    def __repr__(self) -> str:
        shape = "×".join("?" if self.axes[a].bound is not None else str(self.axes[a].extent) for a in self.stages[self.output].outs)
        return f"<Kernel {self.key[:12]} {len(self.stages)} stages, output {shape or 'scalar'}>"


# -- resolved stages ------------------------------------------------------------------------------

@dataclass(frozen=True, slots=True)
class LinearIndex:
    """Σ coef·axis + const + Σ coef·atom: an index expression over the local axes of one stage. Atoms are node numbers."""

    coefs: tuple[tuple[int, int], ...]   # (local axis, coefficient), coefficient ≠ 0
    const: int
    atoms: tuple[tuple[int, int], ...]   # (node, coefficient)

    def coef(self, axis: int) -> int:
        for a, c in self.coefs:
            if a == axis:
                return c
        return 0


def linear_index(root: T, part: Callable[[T], tuple[str, Any]], atom: Callable[[T], int]) -> LinearIndex:
    """Analyse an index expression as Σ coef·axis + const + Σ coef·atom. `part`: returns ("CONST", value), ("AXIS", number), or (operation,
    operands) of an expression; `atom`: the number of its node, if it is neither a sum nor a multiple."""
    coefs, atoms, const = dict[int, int](), dict[int, int](), 0
    todo = [(root, 1)]
    while todo:
        e, times = todo.pop()
        op, of = part(e)
        if op == "CONST":
            const += times * of
        elif op == "AXIS":
            coefs[of] = coefs.get(of, 0) + times
        elif op in ("ADD", "SUB"):
            todo += [(of[0], times), (of[1], times if op == "ADD" else -times)]
        elif op == "NEG":
            todo.append((of[0], -times))
        elif op == "MUL" and (second := part(of[1]))[0] == "CONST":
            todo.append((of[0], times * second[1]))
        elif op == "MUL" and (first := part(of[0]))[0] == "CONST":
            todo.append((of[1], times * first[1]))
        else:
            n = atom(e)
            atoms[n] = atoms.get(n, 0) + times
    return LinearIndex(tuple(sorted((a, c) for a, c in coefs.items() if c)), const, tuple(sorted((n, c) for n, c in atoms.items() if c)))


@dataclass(slots=True)
class Node:
    """One operation of a resolved stage. `deps`: the local axes its value depends on."""

    # const, axis, variable, alu, cast, bitcast, load, read (of a stage), reduce (result of a reduction), part (one partial result)
    kind: str
    op: str
    dtype: DType
    src: tuple[int, ...]
    arg: Any
    deps: tuple[int, ...]
    linear: LinearIndex | None = None   # load: the flat index
    dims: tuple[LinearIndex, ...] = ()  # read: the index along each axis of the stage that is read
    gate: int = -1                 # load: node of the gate
    alt: int = -1


@dataclass(slots=True)
class ReduceNode:
    """One REDUCE of a resolved stage: its combiner, and the nodes of the values that it combines."""

    combiner: str
    values: tuple[int, ...]
    dtypes: tuple[DType, ...]
    made_of: UOp | None = None      # the REDUCE with all inlined stages substituted


class Along(NamedTuple):
    """The values of a node inside a vector along a dim. `step`: growth from one position to the next; `multiple`: divides the value at the
    first position."""

    step: int
    multiple: int


@dataclass(slots=True)
class ResolvedStage:
    """A stage ready to be emitted, with all accesses analysed. Local axes are the stage's outs followed by its reds."""

    stage: Stage
    axes: tuple[int, ...]
    nodes: list[Node]
    reductions: list[ReduceNode]
    value: int                      # node of the value that is stored, after the reductions
    store: LinearIndex | None            # for an output: the flat index that is written
    store_slot: int
    reads: tuple[int, ...]          # stages read, in topological order
    after_reduce: frozenset[int]    # stages read after the reductions; all stages read, if there are no reductions
    lanes_bytes: int = 4            # size in bytes of the widest value type
    read_nodes: tuple[Node, ...] = ()
    read_axes: tuple[tuple[frozenset[int], ...], ...] = ()      # per read and dim: the local axes that move it
    # the values that are loaded or computed by instructions of their own: (number of the node, node, whether it is a load or a read);
    # masks of loads, and products that are part of a multiply-add, are left out
    values: tuple[tuple[int, Node, bool], ...] = ()
    # node → (local axis, n): the value is the same at n neighbouring positions, as it depends on the axis only by a quotient
    coarse: dict[int, tuple[tuple[int, int], ...]] = field(default_factory=dict)
    # (dim, width) → `along_vector` of the stage, cached
    along: dict[tuple[int, int], dict[int, Along]] = field(default_factory=dict, repr=False, compare=False)

    @property
    def combines(self) -> bool:
        """Whether this stage is the reduction of the partial results of a split reduction. Its last axis is not in the kernel, and its
        loops do not depend on the state."""
        return bool(self.axes) and self.axes[-1] < 0

    def reads_with_axes(self) -> Iterable[tuple[Node, tuple[frozenset[int], ...]]]:
        """The reads of other stages, each with the local axes that move each of its dims."""
        return zip(self.read_nodes, self.read_axes, strict=True)


def expand_reads(value: UOp, through: Callable[[UOp], bool]) -> UOp:
    """`value` with every read of a STAGE for which `through` is true replaced by that stage's value at the coordinates read.

    Each node of the result is visited once: equal reads are expanded once, without recursion."""
    done: dict[UOp, UOp] = {}
    values: dict[UOp, UOp] = {}     # read of a STAGE → the stage's value there
    todo = [value]
    while todo:
        u = todo[-1]
        if u in done or u.op is Ops.STAGE:
            done.setdefault(todo.pop(), u)
            continue
        if missing := [s for s in u.src if s not in done]:
            todo += missing
            continue
        src = tuple([done[s] for s in u.src])
        node = _converted_once(u if src == u.src else u.replace(src=src))
        if node.op is not Ops.INDEX or src[0].op is not Ops.STAGE or not through(src[0]):
            done[u] = node
        elif node not in values:
            values[node] = _value_at(src[0], src[1:])
            todo.append(values[node])
        else:
            done[u] = done[node] = done[values[node]]
    return done[value]


def _converted_once(u: UOp) -> UOp:
    """A conversion of a conversion that is exact, as one conversion; other nodes unchanged. int8 → bfloat16 → float32 is int8 → float32."""
    if u.op is not Ops.CAST or u.src[0].op is not Ops.CAST:
        return u
    between, x = u.src[0].dtype, u.src[0].src[0]
    if not holds(between, x.dtype) or not (u.dtype.is_float or between.is_int) or dtypes.index in (between, x.dtype, u.dtype):
        return u
    return x if x.dtype == u.dtype else u.replace(src=(x,))


def _value_at(stage: UOp, coords: tuple[UOp, ...]) -> UOp:
    """The value of a STAGE at `coords`. Stages that it reads are not expanded."""
    done = dict(zip(stage.src[1:], coords, strict=True))
    for u in stage.src[0].toposort(gate=lambda n: n not in done and n.op is not Ops.STAGE):
        if u not in done:
            src = u.src if u.op is Ops.STAGE else tuple([done[s] for s in u.src])
            done[u] = u if src == u.src else u.replace(src=src)
    return done[stage.src[0]]


class _Resolver:
    """Builds the node list of one resolved stage."""

    def __init__(self, kernel: Kernel, stage: Stage, inlined: frozenset[int]):
        self.kernel, self.stage, self.inlined = kernel, stage, inlined
        self.axes = stage.outs + stage.reds
        self.local = {kernel.axes[a].node: i for i, a in enumerate(self.axes)}
        self.nodes: list[Node] = []
        self.made: dict[UOp, int] = {}
        self.unique: dict[tuple[object, ...], int] = {}
        self.reductions: list[ReduceNode] = []
        self.linears: dict[UOp, LinearIndex] = {}

    def expand(self, value: UOp) -> UOp:
        """`value` with every read of an inlined stage replaced by that stage's value at the coordinates read."""
        return expand_reads(value, lambda stage: self.kernel.stage_of[stage] in self.inlined)

    def add(self, node: Node) -> int:
        key = (node.kind, node.op, node.dtype.name, node.src, repr(node.arg), node.linear, node.dims, node.gate, node.alt)
        if (number := self.unique.get(key)) is not None:
            return number
        self.nodes.append(node)
        self.unique[key] = len(self.nodes) - 1
        return len(self.nodes) - 1

    def deps(self, nodes: Iterable[int], linears: Iterable[LinearIndex] = ()) -> tuple[int, ...]:
        axes: set[int] = set()
        for n in nodes:
            axes.update(self.nodes[n].deps)
        for lin in linears:
            axes.update(a for a, _ in lin.coefs)
            for n, _ in lin.atoms:
                axes.update(self.nodes[n].deps)
        return tuple(sorted(axes))

    def axis(self, u: UOp) -> int:
        """The local axis of a RANGE."""
        if u not in self.local:
            raise CompileError(f"stage {self.stage.name} reads range {u!r}, which belongs to another stage")
        return self.local[u]

    def linear(self, u: UOp) -> LinearIndex:
        """Analyse an index expression `u` as Σ coef·axis + const + Σ coef·atom."""
        if (linear := self.linears.get(u)) is not None:
            return linear
        def part(e: UOp) -> tuple[str, Any]:
            return ("CONST", e.arg) if e.op is Ops.CONST else ("AXIS", self.axis(e)) if e.op is Ops.RANGE else (e.op.value, e.src)
        lin = linear_index(u, part, self.node)
        self.linears[u] = lin
        return lin

    def node(self, root: UOp) -> int:
        """The number of the node for an expression without inlined reads."""
        for u in root.toposort(gate=lambda n: n not in self.made and n.op not in (Ops.LOAD, Ops.INDEX, Ops.RANGE, Ops.REDUCE)):
            if u not in self.made:
                self.made[u] = self._make(u)
        return self.made[root]

    def _make(self, u: UOp) -> int:
        if u.op is Ops.CONST:
            return self.add(Node("const", "CONST", u.dtype, (), u.arg, ()))
        if u.op is Ops.RANGE:
            axis = self.axis(u)
            return self.add(Node("axis", "RANGE", u.dtype, (), axis, (axis,)))
        if u.op is Ops.DEFINE_VAR:
            return self.add(Node("variable", "VAR", u.dtype, (), u.arg[0], ()))
        if u.op in ALU:
            src = tuple(self.made[s] for s in u.src)
            return self.add(Node("alu", u.op.value, u.dtype, src, None, self.deps(src)))
        if u.op in (Ops.CAST, Ops.BITCAST):
            src = (self.made[u.src[0]],)
            return self.add(Node(u.op.value.lower(), u.op.value, u.dtype, src, None, self.deps(src)))
        if u.op is Ops.LOAD:
            param, flat = u.src[0].src
            lin = self.linear(flat)
            alt, gate = (self.node(u.src[1]), self.node(u.src[2])) if len(u.src) == 3 else (-1, -1)
            deps = self.deps([n for n in (alt, gate) if n >= 0], [lin])
            return self.add(Node("load", "LOAD", u.dtype, (), param.arg.slot, deps, linear=lin, gate=gate, alt=alt))
        if u.op is Ops.INDEX:
            dims = tuple(self.linear(e) for e in u.src[1:])
            return self.add(Node("read", "INDEX", u.dtype, (), self.kernel.stage_of[u.src[0]], self.deps((), dims), dims=dims))
        if u.op is Ops.REDUCE:
            values, _ = reduce_parts(u)
            ids = tuple(self.node(v) for v in values)
            types = tuple(v.dtype for v in values)
            number = len(self.reductions)
            self.reductions.append(ReduceNode(u.arg[0], ids, types, u))
            outs = tuple(range(len(self.stage.outs)))
            return self.add(Node("reduce", "REDUCE", u.dtype, (), (number, 0), outs))
        if u.op is Ops.GEP:
            number, _ = self.nodes[self.made[u.src[0]]].arg
            return self.add(Node("reduce", "REDUCE", u.dtype, (), (number, u.arg), tuple(range(len(self.stage.outs)))))
        raise CompileError(f"{u.op.value} cannot stand in a kernel's value; see docs/ir.md")


def resolve_stage(kernel: Kernel, stage: Stage, inlined: frozenset[int]) -> ResolvedStage:
    """The stage's value with `inlined` stages substituted, as nodes with analysed accesses."""
    r = _Resolver(kernel, stage, inlined)
    value = r.node(r.expand(stage.value))
    store, slot = None, -1
    if stage.is_output:
        param, flat = stage.node.src[0].src
        store, slot = r.linear(r.expand(flat)), param.arg.slot
    last = reachable(r.nodes, [value, *(a for a, _ in store.atoms)] if store else [value])
    reads = sorted({n.arg for n in r.nodes if n.kind == "read"})
    after = frozenset(r.nodes[n].arg for n in last if r.nodes[n].kind == "read")
    widest = max([n.dtype.itemsize for n in r.nodes if n.dtype != dtypes.index and n.kind != "const" and n.dtype.kind != "b"], default=1)
    read_nodes = tuple(n for n in r.nodes if n.kind == "read")
    read_axes = tuple(tuple(frozenset(r.deps((), [lin])) for lin in n.dims) for n in read_nodes)
    return ResolvedStage(stage, r.axes, r.nodes, r.reductions, value, store, slot, tuple(reads), after, widest, read_nodes, read_axes,
                         _values(r.nodes, r.reductions), _coarse(r.nodes))


def _coarse(nodes: list[Node]) -> dict[int, tuple[tuple[int, int], ...]]:
    """`ResolvedStage.coarse` of a stage."""
    if not any(n.op == "IDIV" for n in nodes):
        return {}
    steps: list[dict[int, int]] = []        # node → axis → positions with equal values
    for n in nodes:
        own = {n.arg: 1} if n.kind == "axis" else _of_quotient(nodes, n)
        if own is None:
            own = {a: 1 for lin in ((n.linear,) if n.linear else ()) + n.dims for a, _ in lin.coefs}
            for i in node_sources(n):
                for a, step in steps[i].items():
                    own[a] = gcd(own.get(a, 0), step)
        steps.append(own)
    return {i: tuple([(a, step) for a, step in own.items() if step > 1]) for i, own in enumerate(steps) if max(own.values(), default=1) > 1}


def _of_quotient(nodes: list[Node], n: Node) -> dict[int, int] | None:
    """The positions with equal values of a quotient of an axis by a constant; None for another node."""
    if n.op != "IDIV" or nodes[n.src[0]].kind != "axis" or nodes[n.src[1]].kind != "const":
        return None
    return {nodes[n.src[0]].arg: nodes[n.src[1]].arg}


def _values(nodes: list[Node], reductions: list[ReduceNode]) -> tuple[tuple[int, Node, bool], ...]:
    """`ResolvedStage.values` of a stage."""
    first = [red.values[0] for red in reductions if red.combiner == "ADD"]
    left_out = _masks(nodes) | {i for i in first if nodes[i].kind == "alu" and nodes[i].op == "MUL"}
    return tuple([(i, n, n.kind in ("load", "read")) for i, n in enumerate(nodes)
                  if i not in left_out and n.dtype != dtypes.index and n.kind in ("load", "read", "alu", "cast")])


def _masks(nodes: list[Node]) -> set[int]:
    """The nodes that are used only by masks of loads."""
    gates = {n.gate for n in nodes if n.gate >= 0}
    used: set[int] = set()
    for i in range(len(nodes) - 1, -1, -1):
        (gates if i in gates and i not in used else used).update(nodes[i].src)
    return gates - used


def reachable(nodes: list[Node], todo: list[int]) -> set[int]:
    """The nodes in `todo` and all nodes that they need, directly or not, except the operands of reductions."""
    reached: set[int] = set()
    while todo:
        n = todo.pop()
        if n not in reached:
            reached.add(n)
            todo += node_sources(nodes[n])
    return reached


def linear_of(r: ResolvedStage, node: int) -> LinearIndex:
    """A node of a stage as Σ coef·axis + const + Σ coef·atom."""
    def part(i: int) -> tuple[str, Any]:
        n = r.nodes[i]
        return ("CONST", n.arg) if n.kind == "const" else ("AXIS", n.arg) if n.kind == "axis" else (n.op, n.src)
    return linear_index(node, part, lambda i: i)


def node_sources(n: Node) -> list[int]:
    """The nodes that a node needs: operands, gate and alternative, and the atoms of its index expressions."""
    operands = list(n.src) + [x for x in (n.gate, n.alt) if x >= 0]
    for lin in ((n.linear,) if n.linear else ()) + n.dims:
        operands += [a for a, _ in lin.atoms]
    return operands
