"""Prints the loop nest that lowering will emit for a state, for people to read: `print_nest(state)`.

    state: GEMM 64×512×256 after UPCAST(o0, 8) UPCAST(o1, 32) STAGE(s1, root) THREAD(o1, 2)

    phase 0: s1 → temporary, 512 KiB, once at prepare
      copy s1[512, 256], laid out in the order it is read:
        parallel j in 0…256 by 16
          parallel i in 0…512 by 32
            for i in 0…32 by 16
              tile i 16 (vector) × j 16
              s1[i, j] = p2[256·i + j]
    phase 1: out → p0, on 2 cores
      parallel o1 in 0…512 by 32
        for o0 in 0…64 by 8
          tile o0 8 × o1 32 (vector)
          acc = 0
          reduce r0 in 0…256
            acc += p1[256·o0 + r0] · s1[o1, r0]
          p0[512·o0 + o1] = acc

`o0` in an expression is the axis' coordinate, summed over all loops of the axis. A tile line gives the positions that lie side by side in
registers. A stage is shown at the loop where it is computed. Stages and axes have the names that opts use; `p0`, `p1` are the kernel's
arguments.
"""
from __future__ import annotations

from collections.abc import Callable, Sequence
from math import prod

from svod.core.ir.uop import Ops
from svod.core.kernel.groups import BLOCK_ROLES, group_of, level_of
from svod.core.kernel.kernel import LinearIndex, Node, ReduceNode, ResolvedStage
from svod.core.kernel.loop_nest import StageNest
from svod.core.kernel.placement import COPY_VECTOR, is_derived
from svod.core.kernel.scheduler import UNROLL, UPCAST, Scheduler
from svod.core.machine.levels import Level, MemorySpace
from svod.core.tree.build import TreeMaker
from svod.core.tree.launch import cores_of_phase
from svod.core.tree.nodes import (
    Body,
    Compute,
    Ends,
    Frame,
    Inner,
    Launch,
    Loop,
    Phase,
    PhaseKind,
    Pipeline,
    Reduction,
    Span,
    Update,
    barriers_of,
)
from svod.core.tree.passes import loop_tree
from svod.system import quantities

INDENT = "  "
MAX_EXPRESSION = 110        # longest text of a value, in characters; a longer one has its inner parts replaced by …
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
    """Writes the text of one state."""

    def __init__(self, state: Scheduler) -> None:
        self.state, self.kernel = state, state.kernel
        self.maker = TreeMaker(state)
        self.tree = loop_tree(state)
        self.nest, self.plan = self.maker.nest, self.maker.placement
        self.lines: list[str] = []
        # (stage, node, binding strength of the operator around it, depth) → text
        self._texts: dict[tuple[int, int, int, int], str] = {}

    # -- phases -----------------------------------------------------------------------------------
    def run(self) -> str:
        for number, phase in enumerate(self.tree):
            nest = self.nest.stages[phase.stage]
            self._line(0, f"phase {number}: {self._title(phase, nest)}")
            self._phase(phase, nest)
        return "\n".join(self.lines)

    def _title(self, phase: Phase, nest: StageNest) -> str:
        """The headline of a phase: the stage it computes, where the result goes, and the cores or threads that share the work."""
        state, stage = self.state, nest.r.stage
        cores, group = cores_of_phase(self.maker, phase), group_of(state, self.plan, phase.stage).threads
        if phase.kind is PhaseKind.COMBINE:
            group = phase.launch.frame.pieces[-1][0].stride
        shared = f", on {cores} cores" if cores > 1 and not phase.is_once else ""
        shared += f", in groups of {group} threads" if group > 1 else ""
        if phase.kind is PhaseKind.PARTIAL:
            return f"{stage.name}, partial results{shared}"
        if phase.kind is PhaseKind.COMBINE:
            return f"{stage.name} → p{nest.r.store_slot}, combines {phase.launch.frame.bounds[-1]} partial results{shared}"
        if phase.kind is PhaseKind.OUTPUT:
            past = ", stored past the caches" if phase.launch.is_non_temporal else ""
            ahead = "".join(f", {name} prefetched {n} iteration{'s' * (n > 1)} ahead" for name, n in state.prefetch)
            return f"{stage.name} → p{nest.r.store_slot}{shared}{past}{ahead}"
        memory = quantities.size(prod(nest.region) * stage.dtype.itemsize)
        return f"{stage.name} → temporary, {memory}{', once at prepare' if phase.is_once else shared}"

    def _phase(self, phase: Phase, nest: StageNest) -> None:
        """Write the loops of a phase."""
        depth, target, launch = 1, None, phase.launch
        if phase.kind is PhaseKind.COMBINE:
            nest = nest._replace(r=launch.frame.r, axes=launch.frame.pieces)
        word = _WORDS[Level.GRID if self.state.target.has_groups else Level.CORE]
        if phase.split is not None:
            axis = self.kernel.axes[nest.r.axes[phase.split.axis]]
            self._line(1, f"{word} part of {axis.name} in 0…{phase.split.parts}")
            depth, target = 2, f"partial[part] of {nest.r.stage.name}"
        if is_derived(nest.r.stage):
            self._copied(Compute(nest), depth)
            depth += 1
        for number in range(launch.num_loops):
            if launch.frame.loops[number].piece.extent > 1:
                is_shared = self.state.target.has_groups or cores_of_phase(self.maker, phase) > 1
                loop = self._loop(nest, Loop(launch.frame, number, launch.body), word if is_shared else "for")
                self._line(depth, loop + self._launched(launch, number))
                depth += 1
        self._body(launch.body, nest, depth, target)

    def _launched(self, launch: Launch, number: int) -> str:
        """Notes on loop `number` of a launch: its order, and how it ends."""
        a = launch.frame.loops[number].axis
        notes = [", the last first"] if a in launch.longest_first else []
        if a in launch.ended and number == max(k for k in range(launch.num_loops) if launch.frame.loops[k].axis == a):
            notes.append(_ends_at_run_time(launch.frame, a, a in launch.moved_back, _steps_of(launch, a)))
        return "".join(notes)

    # -- bodies -----------------------------------------------------------------------------------
    def _body(self, body: Body, nest: StageNest, depth: int, target: str | None) -> None:
        """Write the stages, loops and statements of a body. `nest`: the stage that the body belongs to; `target`: the text of the element
        it stores, or None for the stage's usual one."""
        self._computed(body, depth)
        node = body.inner
        if isinstance(node, Loop):
            self._nested(node, nest, depth, lambda inside, at: self._body(inside, nest, at, target))
        elif isinstance(node, Reduction):
            self._reduction(node, nest, depth, target or self._target(nest.r))
        else:
            self._tile(nest, depth)
            self._line(depth, f"{target or self._target(nest.r)} = {self._value(nest.r)}")

    def _nested(self, node: Loop, nest: StageNest, depth: int, inside: Callable[[Body, int], None]) -> None:
        """Write a loop and its body. If the loop has no whole iteration, the body of its tail is shown instead."""
        outer, pipeline = depth, node.pipeline
        if pipeline is not None:
            self._barriers(depth, barriers_of(pipeline.prologue))
        if node.loop.piece.extent > 1:
            self._line(depth, self._loop(nest, node))
            depth += 1
        if pipeline is not None:
            self._barriers(depth, barriers_of(pipeline.body))
            self._stages(tuple([copy.compute for copy in pipeline.copies]), depth, pipeline)
        inside(node.tails[0].body if node.span is Span.NEVER else node.body, depth)
        if pipeline is not None:
            self._barriers(depth, barriers_of(pipeline.later))
            self._barriers(outer, barriers_of(pipeline.epilogue))

    def _reduction(self, node: Reduction, nest: StageNest, depth: int, target: str) -> None:
        """Write the accumulators, the loops that add to them, and the store of the result."""
        r = nest.r
        self._tile(nest, depth)
        for k, red in enumerate(r.reductions):
            self._line(depth, f"{self._accumulator(r, k)} = {_START.get(red.combiner, 'neutral value')}")
        self._reducing(node.inner, nest, depth)
        self._barriers(depth, node.barrier)
        if node.through_memory:
            self._line(depth, "partial results of threads to shared memory")
            self._barriers(depth, 1)
        names = dict.fromkeys(self.kernel.axes[r.axes[node.frame.loops[j].axis]].name for j in node.in_memory)
        every = f"for all {', '.join(names)}: " if names else ""
        self._line(depth, f"{every}{target} = {self._value(r)}")

    def _reducing(self, node: Inner, nest: StageNest, depth: int) -> None:
        if isinstance(node, Loop):
            def inside(body: Body, at: int) -> None:
                self._computed(body, at)
                self._reducing(body.inner, nest, at)
            self._nested(node, nest, depth, inside)
        elif isinstance(node, Update):
            self._reducing(node.inner, nest, depth)
        else:
            for k, red in enumerate(nest.r.reductions):
                self._line(depth, self._update(nest.r, k, red))

    def _computed(self, body: Body, depth: int) -> None:
        """Write the stages of a body."""
        self._stages(body.stages, depth)
        self._barriers(depth, body.barrier)

    def _barriers(self, depth: int, count: int) -> None:
        """Write barriers, each of which lets all threads of a group wait for each other."""
        self.lines += [INDENT * depth + "barrier"] * count

    def _stages(self, stages: tuple[Compute, ...], depth: int, pipeline: Pipeline | None = None) -> None:
        """Write the stages that are computed at one place of the loops. `pipeline`: the pipelined loop that copies them ahead, or None."""
        for node in stages:
            r = node.nest.r
            self._barriers(depth, node.barrier_first)
            if is_derived(r.stage):
                self._copied(node, depth, pipeline)
                self._stages(node.before, depth + 1)
            else:
                region = ", ".join(map(str, node.nest.region))
                memory = {MemorySpace.SHARED: "shared memory", MemorySpace.HELD: "registers"}.get(node.nest.space, "scratch")
                where = " in a register" if node.nest.space is MemorySpace.REGISTER else f"[{region}] in {memory}"
                self._line(depth, f"stage {r.stage.name}{where}:")
            self._barriers(depth + 1, node.barrier_to_store)
            if node.body is None or node.turns is not None:
                self._line(depth + 1, f"{self._target(r)} = {self._value(r)}")
            else:
                self._body(node.body, node.nest, depth + 1, None)

    def _copied(self, node: Compute, depth: int, pipeline: Pipeline | None = None) -> None:
        """Write the headline of a copy's loops. `pipeline`: as in `_stages`."""
        r, shape = node.nest.r, ", ".join(map(str, node.nest.region))
        if node.in_place:
            self._line(depth, f"operand {r.stage.name}[{shape}], computed where it is multiplied:")
        else:
            self._line(depth, f"copy {r.stage.name}[{shape}]{self._shared_copy(node, pipeline)}, laid out in the order it is read:")

    def _shared_copy(self, node: Compute, pipeline: Pipeline | None) -> str:
        """How all threads of a group copy a stage into shared memory; "" if each thread has its own copy."""
        stage = node.nest
        if node.turns is None or stage.copy is None or stage.layout is None:
            return ""
        vectors = f" in vectors of {stage.copy.width}" if stage.copy.vector >= 0 else ""
        pad = f", {stage.layout.row_pad} elements behind each row" if stage.layout.row_pad else ""
        swizzle = f", rows of {stage.layout.swizzle.lines} lines swizzled" if stage.layout.swizzle is not None else ""
        ahead = f", {pipeline.ahead} ahead in {pipeline.buffers} buffers" if pipeline is not None else ""
        return f" into shared memory, by {node.turns.threads} threads{vectors}{pad}{swizzle}{ahead}"

    def _loop(self, nest: StageNest, node: Loop, word: str = "for") -> str:
        """A loop as one line: its positions and step, and how it ends. `word`: the keyword for an output loop of a copy."""
        piece, a = node.loop.piece, node.axis
        step = f" by {piece.stride}" if piece.stride > 1 else ""
        if piece.row < 0:
            word, end = "reduce" if a >= node.frame.num_outs else word, min(piece.extent * piece.stride, node.frame.bounds[a])
            return f"{word} {self._local_names(nest.r)[a]} in 0…{end}{step}{self._notes(node, a, True)}"
        axis = self.kernel.axes[nest.r.axes[a]]
        outermost = self.state.axis_rows[axis.index][0] == piece.row
        end = piece.extent * piece.stride
        if outermost:
            end = min(end, (*nest.region, *(self.state.axis_extent(x) for x in nest.r.stage.reds))[a])
        word = _WORDS.get(level_of(self.state, piece.row), "reduce" if axis.kind == "r" else "for")
        padded = f"   (padded from {axis.extent})" if outermost and self.state.pads[axis.index] else ""
        is_cut = outermost and self.state.split_reduce is not None and self.state.split_reduce.axis == axis.index
        return f"{word} {axis.name} in {'its part of ' * is_cut}0…{end}{step}{padded}{self._notes(node, a, outermost)}"

    def _notes(self, node: Loop, a: int, outermost: bool) -> str:
        """Notes on how a loop ends, and how its iterations are grouped or skipped."""
        notes = []
        if outermost and node.frame.ends(a) is Ends.MOVED_BACK:
            notes.append(", the last tile moved back")
        elif outermost and node.frame.ends(a) is Ends.GUARDED and not self.state.target.has_groups and not node.tails:
            notes.append(", the last tile masked")
        if node.span is Span.ALIGNED:
            notes.append(", by vectors where the row begins and ends")
        elif node.span is Span.WHOLE:
            notes.append(_ends_at_run_time(node.frame, a, node.is_moved_back, [t.step for t in node.tails]))
        elif node.tails and node.span is not Span.NEVER:
            notes.append(f", then {node.tails[0].step} more")
        if node.blocks:
            notes.append(f", in blocks of {' of '.join(map(str, reversed(node.blocks)))}")
        if node.window is not None or node.limits:
            notes.append(", without iterations that add nothing")
        return "".join(notes)

    def _tile(self, stage: StageNest, depth: int) -> None:
        """Write the positions that the threads of a group divide among themselves, those in registers, and those that are unrolled."""
        tile, unrolled, threads = [], [], []
        for name, group in zip(self._local_names(stage.r), stage.axes, strict=True):
            for p in group:
                size = f"{name} {p.extent}{' (vector)' if p is stage.vector_loop or p.row == COPY_VECTOR else ''}"
                if p.extent > 1 and p.role == UPCAST:
                    tile.append(size)
                elif p.extent > 1 and p.role == UNROLL:
                    unrolled.append(size)
                elif p.extent > 1 and p.role in BLOCK_ROLES:
                    threads.append(size)
        if threads:
            self._line(depth, f"threads {' × '.join(threads)}")
        if tile:
            self._line(depth, f"tile {' × '.join(tile)}")
        if unrolled:
            self._line(depth, f"unroll {', '.join(unrolled)}")

    # -- statements -------------------------------------------------------------------------------
    def _target(self, r: ResolvedStage) -> str:
        if r.store is not None:
            return f"p{r.store_slot}[{self._linear(r, r.store)}]"
        return f"{r.stage.name}[{', '.join(self._local_names(r)[:len(r.stage.outs)])}]" if r.stage.outs else r.stage.name

    def _local_names(self, r: ResolvedStage) -> list[str]:
        if is_derived(r.stage) and len(r.axes) <= 6:
            return list("ijklmn"[:len(r.axes)])
        return [self.kernel.axes[a].name if a >= 0 else "part" for a in r.axes]

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
        """A value as an expression of bounded length: nested as deep as still fits `MAX_EXPRESSION` characters."""
        for depth in (40, 8, 6, 4, 3, 2, 1):
            text = self._expression(r, r.nodes[node], outer, depth)
            if len(text) <= MAX_EXPRESSION:
                break
        return text

    def _expression(self, r: ResolvedStage, n: Node, outer: int, depth: int) -> str:
        """A node as text, cached by depth. Text that is too long is cut off: an expression that contains it is too long as well, so it is
        never shown."""
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
        if n.kind == "part":
            return f"partial[part] of {r.stage.name}"
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


def _ends_at_run_time(frame: Frame, a: int, is_moved_back: bool, steps: Sequence[int]) -> str:
    """Describe how a loop ends whose extent is known only at run time."""
    moved = ", the last tile moved back" if is_moved_back else ""
    smaller = [str(step) for step in steps if step < frame.reach(a)]
    return f"{moved}, the rest by {' or '.join(smaller)}" if smaller else moved


def _steps_of(launch: Launch, a: int) -> list[int]:
    """The step sizes with which a launch covers the remainder of local axis `a`; [] if it has none."""
    parts = launch.partly
    while parts is not None and not isinstance(parts, Body):
        if parts[0].axis == a:
            return [part.step for part in parts]
        parts = parts[0].inside
    return []
