"""A state as the loop nest that lowering will emit, for people: `print_nest(state)`.

    state: GEMM 64×512×256 after UPCAST(o0, 8) UPCAST(o1, 32) STAGE(s1, root) THREAD(o1, 2)

    phase 0: s1 → temporary, 512 KiB, once at prepare
      copy s1[512, 256], laid out in the order it is read:
        s1[i, j] = p2[256·i + j]
    phase 1: out → p0, on 2 cores
      parallel o1 in 0…512 by 32
        for o0 in 0…64 by 8
          tile o0 8 × o1 32 (vector)
          acc = 0
          reduce r0 in 0…256
            acc += p1[256·o0 + r0] · s1[o1, r0]
          p0[512·o0 + o1] = acc

`o0` stands for the axis' coordinate, whichever loops make it; a tile is the positions side by side in registers. A stage is shown at
the point where it is computed. Names of stages and axes are those that opts use; `p0`, `p1` are the kernel's arguments.
"""
from __future__ import annotations

from math import prod

from svod.core.ir.uop import Ops
from svod.core.kernel.groups import group_of, level_of, phase_of
from svod.core.kernel.kernel import LinearIndex, Node, ReduceNode, ResolvedStage
from svod.core.kernel.loop_nest import copied_ahead, loop_nest
from svod.core.kernel.placement import EmittedLoop, first_reduce, is_computed_once, is_derived
from svod.core.kernel.scheduler import UNROLL, UPCAST, Scheduler, cores_of
from svod.core.machine.levels import Level, MemorySpace

INDENT = "  "
MAX_EXPRESSION = 110        # characters of a value before its inner parts are left out
_INFIX = {Ops.ADD.value: ("+", 4), Ops.SUB.value: ("-", 4), Ops.MUL.value: ("·", 5), Ops.FDIV.value: ("/", 5), Ops.IDIV.value: ("//", 5),
          Ops.MOD.value: ("%", 5), Ops.CMPLT.value: ("<", 3), Ops.CMPLE.value: ("≤", 3), Ops.CMPEQ.value: ("==", 3),
          Ops.CMPNE.value: ("≠", 3), Ops.AND.value: ("&", 2), Ops.XOR.value: ("^", 1), Ops.OR.value: ("|", 0), Ops.SHL.value: ("<<", 6),
          Ops.SHR.value: (">>", 6)}
_LOOSEST, _ATOM = -1, 9
_WORDS = {Level.CORE: "parallel", Level.GRID: "grid"}
_UPDATE = {"ADD": "{0} += {1}", "MUL": "{0} *= {1}"}
_START = {"ADD": "0", "MUL": "1", "MAX": "-inf", "MIN": "inf", "ARGMAX": "(-inf, 0)", "ARGMIN": "(inf, 0)", "EXPSUM": "(-inf, 0, 0)"}


def print_nest(state: Scheduler) -> str:
    """The loops of all phases and stages, with extents and roles. Raises KernelOptError for placements that contradict each other."""
    return _Printer(state).run()


class _Printer:
    """Writes one state."""

    def __init__(self, state: Scheduler) -> None:
        self.state, self.kernel = state, state.kernel
        self.nest = loop_nest(state)
        self.plan = self.nest.placement
        self.lines: list[str] = []
        self._texts: dict[tuple[int, int, int, int], str] = {}      # by stage, node, strength of the operator around it, and depth

    # -- phases -----------------------------------------------------------------------------------
    def run(self) -> str:
        state = self.state
        for number, s in enumerate(sorted(self.plan.roots, key=lambda s: not is_computed_once(state, self.plan, s))):
            r = self.plan.resolved[s]
            assert r is not None, "a root stage is not inlined"
            stage = r.stage
            once = is_computed_once(state, self.plan, s)
            threads = cores_of(state)
            cores = f", on {threads} cores" if threads > 1 and not once and not state.target.has_groups else ""
            group = group_of(state, self.plan, s).threads
            cores += f", in groups of {group} threads" if group > 1 else ""
            split = state.split_reduce if state.split_reduce and self.kernel.axes[state.split_reduce.axis].stage == s else None
            if split:
                axis = self.kernel.axes[split.axis]
                self._line(0, f"phase {number}: {stage.name}, partial results{cores}")
                self._line(1, f"{_WORDS[Level.GRID if state.target.has_groups else Level.CORE]} part of {axis.name} in 0…{split.parts}")
                self._stage(r, 2, f"partial[part] of {stage.name}")
                self._line(0, f"phase {number + 1}: {stage.name} → p{r.store_slot}, combines {split.parts} partial results")
                self._line(1, f"{self._target(r)} = {self._value(r)}")
                continue
            if stage.is_output:
                past = ", stored past the caches" if state.stream else ""
                ahead = "".join(f", {name} prefetched {n} iteration{'s' * (n > 1)} ahead" for name, n in state.prefetch)
                self._line(0, f"phase {number}: {stage.name} → p{r.store_slot}{cores}{past}{ahead}")
            else:
                size = _bytes(prod(self.nest.stages[s].region) * stage.dtype.itemsize)
                self._line(0, f"phase {number}: {stage.name} → temporary, {size}{', once at prepare' if once else cores}")
            self._stage(r, 1)
        return "\n".join(self.lines)

    # -- one stage --------------------------------------------------------------------------------
    def _stage(self, r: ResolvedStage, depth: int, target: str | None = None) -> None:
        """The loops and statements of a stage, `depth` deep."""
        s = r.stage.index
        target = target or self._target(r)
        if is_derived(r.stage):
            shape = ", ".join(map(str, self.nest.stages[s].region))
            if self.nest.stages[s].space is MemorySpace.HELD:
                self._line(depth, f"operand {r.stage.name}[{shape}], computed where it is multiplied:")
            else:
                self._line(depth, f"copy {r.stage.name}[{shape}]{self._shared_copy(s)}, laid out in the order it is read:")
            self._children(s, 0, depth + 1)
            self._line(depth + 1, f"{target} = {self._value(r)}")
            return
        order = self.state.order[s]
        reduce_at = first_reduce(self.state, s)
        at = depth
        store_at = depth
        for i in range(len(order) + 1):
            if i == reduce_at and r.reductions:
                self._tile(r, at)
                store_at = at
                for k, red in enumerate(r.reductions):
                    self._line(at, f"{self._accumulator(r, k)} = {_START.get(red.combiner, 'neutral value')}")
            self._children(s, i, at)
            if i == len(order):
                break
            piece = next((p for group in self.nest.stages[s].axes for p in group if p.row == order[i]), None)
            if piece is not None and piece.extent > 1:
                self._line(at, self._loop(s, piece))
                at += 1
        if not r.reductions:
            self._tile(r, at)
            self._line(at, f"{target} = {self._value(r)}")
            return
        for k, red in enumerate(r.reductions):
            self._line(at, self._update(r, k, red))
        inner = [self._axis_name(row) for row in order[reduce_at:] if self.kernel.axes[self.state.rows[row].axis].kind == "o"]
        every = f"for all {', '.join(dict.fromkeys(inner))}: " if inner else ""
        self._line(store_at, f"{every}{target} = {self._value(r)}")

    def _children(self, s: int, loops: int, depth: int) -> None:
        """The stages that live inside the first `loops` loops of a stage."""
        if loops == 0 and self.plan.paths[s] == ():
            return      # before any loop of a phase: such stages are phases
        children = self.plan.children.get((s, loops), ())
        if any(self.nest.stages[c].space is MemorySpace.SHARED for c in children):
            self._line(depth, "barrier, once others have read what is shared")
        for child in children:
            r = self.plan.resolved[child]
            assert r is not None, "a placed stage is not inlined"
            if not is_derived(r.stage):
                stage = self.nest.stages[child]
                region = ", ".join(map(str, stage.region))
                memory = {MemorySpace.SHARED: "shared memory", MemorySpace.HELD: "registers"}.get(stage.space, "scratch")
                where = " in a register" if stage.space is MemorySpace.REGISTER else f"[{region}] in {memory}"
                self._line(depth, f"stage {r.stage.name}{where}:")
                self._stage(r, depth + 1)
            else:
                self._stage(r, depth)

    def _shared_copy(self, s: int) -> str:
        """How all threads of a group copy a stage; nothing for what each has to itself."""
        stage = self.nest.stages[s]
        if stage.copy is None or stage.layout is None:
            return ""
        threads = group_of(self.state, self.plan, phase_of(self.plan, s)).threads
        vectors = f" in vectors of {stage.copy.width}" if stage.copy.vector >= 0 else ""
        pad = f", {stage.layout.row_pad} elements behind each row" if stage.layout.row_pad else ""
        swizzle = f", rows of {stage.layout.swizzle.lines} lines swizzled" if stage.layout.swizzle is not None else ""
        ahead = f", {copied_ahead(self.state, self.nest)} ahead in {stage.buffers} buffers" if stage.buffers > 1 else ""
        return f" into shared memory, by {threads} threads{vectors}{pad}{swizzle}{ahead}"

    def _loop(self, s: int, piece: EmittedLoop) -> str:
        axis = self.kernel.axes[self.state.rows[piece.row].axis]
        outermost = self.state.axis_rows[axis.index][0] == piece.row
        end = piece.extent * piece.stride
        if outermost:
            local = self.plan.resolved[s].axes.index(axis.index)  # type: ignore[union-attr]  # a stage with loops is not inlined
            end = min(end, (*self.nest.stages[s].region, *(self.state.axis_extent(a) for a in self.kernel.stages[s].reds))[local])
        word = _WORDS.get(level_of(self.state, piece.row), "reduce" if axis.kind == "r" else "for")
        step = f" by {piece.stride}" if piece.stride > 1 else ""
        padded = f"   (padded from {axis.extent})" if outermost and self.state.pads[axis.index] else ""
        is_cut = outermost and self.state.split_reduce is not None and self.state.split_reduce.axis == axis.index
        return f"{word} {self._axis_name(piece.row)} in {'its part of ' * is_cut}0…{end}{step}{padded}"

    def _tile(self, r: ResolvedStage, depth: int) -> None:
        """The positions that the threads of a group compute, and those in registers."""
        stage = self.nest.stages[r.stage.index]
        tile, unrolled, threads = [], [], []
        for group in stage.axes:
            for p in group:
                if p.extent > 1 and p.role == UPCAST:
                    tile.append(f"{self._axis_name(p.row)} {p.extent}{' (vector)' if p is stage.vector_loop else ''}")
                elif p.extent > 1 and p.role == UNROLL:
                    unrolled.append(f"{self._axis_name(p.row)} {p.extent}")
                elif p.extent > 1 and level_of(self.state, p.row) is Level.BLOCK:
                    threads.append(f"{self._axis_name(p.row)} {p.extent}")
        if threads:
            self._line(depth, f"threads {' × '.join(threads)}")
        if tile:
            self._line(depth, f"tile {' × '.join(tile)}")
        if unrolled:
            self._line(depth, f"unroll {', '.join(unrolled)}")

    def _axis_name(self, row: int) -> str:
        return self.kernel.axes[self.state.rows[row].axis].name

    # -- statements -------------------------------------------------------------------------------
    def _target(self, r: ResolvedStage) -> str:
        if r.store is not None:
            return f"p{r.store_slot}[{self._linear(r, r.store)}]"
        return f"{r.stage.name}[{', '.join(self._local_names(r)[:len(r.stage.outs)])}]" if r.stage.outs else r.stage.name

    def _local_names(self, r: ResolvedStage) -> list[str]:
        if is_derived(r.stage) and len(r.axes) <= 6:
            return list("ijklmn"[:len(r.axes)])
        return [self.kernel.axes[a].name for a in r.axes]

    def _accumulator(self, r: ResolvedStage, k: int) -> str:
        return "acc" if len(r.reductions) == 1 else f"acc{k}"

    def _update(self, r: ResolvedStage, k: int, red: ReduceNode) -> str:
        name = self._accumulator(r, k)
        values = ", ".join(self._text(r, v, _LOOSEST) for v in red.values)
        form = _UPDATE.get(red.combiner, f"{{0}} = {red.combiner.lower()}({{0}}, {{1}})")
        return form.format(name, values if len(red.values) == 1 else f"({values})")

    def _value(self, r: ResolvedStage) -> str:
        return self._text(r, r.value, _LOOSEST)

    def _text(self, r: ResolvedStage, node: int, outer: int) -> str:
        """A value as an expression of bounded length: to the largest depth at which it is short enough."""
        for depth in (40, 8, 6, 4, 3, 2, 1):
            text = self._expression(r, r.nodes[node], outer, depth)
            if len(text) <= MAX_EXPRESSION:
                break
        return text

    def _expression(self, r: ResolvedStage, n: Node, outer: int, depth: int) -> str:
        """A node as text, written once for each depth. What is too long is cut: nobody prints what contains it."""
        key = id(r), id(n), outer, depth
        if key not in self._texts:
            text = self._written(r, n, outer, depth)
            self._texts[key] = text if depth <= 1 else text[:MAX_EXPRESSION + 1]
        return self._texts[key]

    def _written(self, r: ResolvedStage, n: Node, outer: int, depth: int) -> str:
        if n.kind == "const":
            return f"{n.arg:g}" if isinstance(n.arg, float) else str(n.arg)
        if n.kind == "axis":
            axis: int = n.arg
            return self._local_names(r)[axis]
        if n.kind == "reduce":
            number, component = n.arg
            name = self._accumulator(r, number)
            return name if len(r.reductions[number].values) == 1 else f"{name}.{component}"
        if n.kind == "read":
            coordinates = ", ".join(self._linear(r, d, depth) for d in n.dims)
            return f"{self.kernel.stages[n.arg].name}[{coordinates}]" if n.dims else self.kernel.stages[n.arg].name
        if n.kind == "load":
            assert n.linear is not None, "a load has an index"
            text = f"p{n.arg}[{self._linear(r, n.linear, depth)}]"
            if n.gate < 0:
                return text
            text = f"{text} if inside else {self._expression(r, r.nodes[n.alt], _LOOSEST, depth - 1)}"
            return text if outer == _LOOSEST else f"({text})"
        if depth <= 0:
            return "…"
        if n.kind in ("cast", "bitcast"):
            return f"{n.dtype.name}({self._expression(r, r.nodes[n.src[0]], _LOOSEST, depth)})"
        infix = _INFIX.get(n.op)
        if infix is not None:
            sign, strength = infix
            left = self._expression(r, r.nodes[n.src[0]], strength, depth - 1)
            right = self._expression(r, r.nodes[n.src[1]], strength + (n.op not in (Ops.ADD.value, Ops.MUL.value)), depth - 1)
            text = f"{left} {sign} {right}"
            return f"({text})" if strength < outer else text
        if n.op == Ops.NEG.value:
            return f"-{self._expression(r, r.nodes[n.src[0]], _ATOM, depth - 1)}"
        if n.op == Ops.RECIPROCAL.value:
            text = f"1 / {self._expression(r, r.nodes[n.src[0]], 6, depth - 1)}"
            return f"({text})" if outer >= 5 else text
        operands = ", ".join(self._expression(r, r.nodes[x], _LOOSEST, depth - 1) for x in n.src)
        return f"{n.op.lower()}({operands})"

    def _linear(self, r: ResolvedStage, lin: LinearIndex, depth: int = 4) -> str:
        names = self._local_names(r)
        terms = [(c, names[a]) for a, c in lin.coefs]
        terms += [(c, self._expression(r, r.nodes[a], 5, depth - 1)) for a, c in lin.atoms]
        if not terms:
            return str(lin.const)

        def size(term: tuple[int, str]) -> int:
            c, _ = term
            return abs(c)
        out = ""
        for c, name in sorted(terms, key=size, reverse=True):
            sign = " - " if c < 0 else " + "
            out += (sign if out else "-" if c < 0 else "") + (name if abs(c) == 1 else f"{abs(c)}·{name}")
        return out + (f" {'-' if lin.const < 0 else '+'} {abs(lin.const)}" if lin.const else "")

    def _line(self, depth: int, text: str) -> None:
        self.lines.append(INDENT * depth + text)


def _bytes(n: int) -> str:
    if n >= 1 << 20:
        return f"{n / (1 << 20):.3g} MiB"
    return f"{n / 1024:.3g} KiB" if n >= 1024 else f"{n} B"
