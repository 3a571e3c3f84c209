"""The counts that prices are made of are those of the loops as they run: the tests run a tree, one iteration after the other."""
from __future__ import annotations

import random
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from itertools import product
from math import prod

import pytest

from svod.compile.lower.lower import lower
from svod.compile.lower.program import Instruction
from svod.core.cost.runs import StageRuns, stage_runs
from svod.core.kernel.apply import apply_opts
from svod.core.kernel.chain_text import parse_chain
from svod.core.kernel.groups import phase_of
from svod.core.kernel.kernel import Kernel
from svod.core.kernel.loop_nest import loop_nest
from svod.core.kernel.placement import place_stages
from svod.core.kernel.scheduler import UNROLL, Scheduler
from svod.core.machine.target import Target
from svod.core.tree.build import TreeMaker
from svod.core.tree.nodes import Accumulate, Body, Compute, Frame, Inner, Loop, Phase, PhaseKind, Reduction, Update
from svod.core.tree.passes import counted_tree, loop_tree
from svod.core.tree.tails import is_split
from svod.errors import KernelOptError
from svod.tensor import Tensor
from tests.chains import group_state, pipelined_state, random_state
from tests.compile.native import AVX2, AVX512
from tests.core.corpus import CORPUS, conv, data, kernel_of
from tests.core.cost.groups.test_group_cost import GPU
from tests.core.kernel.test_online import attention, online
from tests.core.tree.test_coverage import ENDED
from tests.draws import a_half, chains
from tests.toy_backend.target import TOY

TARGETS = {"avx512": replace(AVX512, threads=4), "avx2": AVX2, "gpu": GPU, "webgpu": replace(GPU, subgroup=0, software_lanes=8), "toy": TOY}
MOST_STEPS = 20_000         # iterations that a tested state may run
Opened = dict[int, int]     # local axis → position of the open loops over it


class TooLong(Exception):
    """A state runs more than `MOST_STEPS` iterations."""


class Runner:
    """Runs the loops of one part of a phase. By stage: how often it is computed, how often blocks of its sums end, and how often its
    accumulators are updated in memory; by its loops: how often each is entered, and its iterations."""

    def __init__(self, phase: Phase, nests: dict[int, tuple[int, ...]], part: int) -> None:
        self.phase, self.tiles, self.part = phase, nests, part
        self.computed, self.ends, self.updates = Counter[int](), Counter[int](), Counter[int]()
        self.entered, self.iterations = Counter[tuple[int, int]](), Counter[tuple[int, int]]()
        self.skipping = set[int]()      # rows of loops that skip iterations
        self.steps = 0

    def run(self) -> None:
        launch = self.phase.launch
        self.computed[self.phase.stage] += 1
        for at in product(*[range(loop.piece.extent) for loop in launch.loops]):
            opened: Opened = {}
            for i, loop in zip(at, launch.loops, strict=True):
                opened[loop.axis] = opened.get(loop.axis, 0) + i * loop.piece.stride
            self.body(launch.body, opened)

    def body(self, body: Body, opened: Opened) -> None:
        self.steps += 1
        if self.steps > MOST_STEPS:
            raise TooLong
        self.stages(body.stages)
        self.inner(body.inner, opened)

    def stages(self, stages: Sequence[Compute]) -> None:
        for node in stages:
            self.stages(node.before)
            self.computed[node.stage] += 1
            if node.body is not None and node.turns is None:
                self.body(node.body, {})

    def inner(self, node: Inner, opened: Opened) -> None:
        if isinstance(node, Reduction):
            self.inner(node.inner, opened)
        elif isinstance(node, Update):
            s = _stage_of(node)
            self.updates[s] += 1
            self.ends[s] += node.in_block
            self.inner(node.inner, opened)
        elif isinstance(node, Loop):
            self.loop(node, opened)
        elif isinstance(node, Accumulate):
            reduced = node.frame.pieces[node.frame.num_outs:]
            self.blocks(node.frame, prod([p.extent for own in reduced for p in own if p.role == UNROLL]), node.blocks)

    def loop(self, node: Loop, opened: Opened) -> None:
        frame, a = node.frame, node.axis
        iterations = self.iterations_of(node, opened)
        self.entered[frame.r.stage.index, node.number] += 1
        self.iterations[frame.r.stage.index, node.number] += len(iterations)
        self.blocks(frame, len(iterations), node.blocks)
        for i in iterations:
            self.stages([copy.compute for copy in node.pipeline.copies] if node.pipeline is not None else ())
            self.body(node.body, {**opened, a: opened.get(a, 0) + i * node.loop.piece.stride})

    def iterations_of(self, node: Loop, opened: Opened) -> list[int]:
        """The iterations of a loop that are not skipped, a tail as the last of them."""
        frame, split, n = node.frame, self.phase.split, node.loop.piece.extent
        every = list(range(n))
        if node.window is not None or node.limits:
            self.skipping.add(node.loop.piece.row)
        if split is not None and is_split(split, node):
            return every[self.part * split.chunk // node.stride:(self.part + 1) * split.chunk // node.stride]
        if node.window is not None:
            w, first = node.window, opened.get(node.window.output, 0)
            outer = {loop.piece.row for loop in frame.loops[:node.number]}
            offsets = [range(0, p.extent * p.stride, p.stride) for p in frame.pieces[w.output] if p.row not in outer]
            tile = [first + sum(at) for at in product(*offsets)]
            return [q for q in every if any(w.low <= w.step * o + w.apart * q < w.high for o in tile)]
        for limit in node.limits:
            first = opened.get(limit.output, 0)
            kept = range(*limit.blocks(first, first + self.tiles[frame.r.stage.index][limit.output] - 1, n))
            every = [i for i in every if i in kept]
        return every

    def blocks(self, frame: Frame, iterations: int, sizes: tuple[int, ...]) -> None:
        self.ends[frame.r.stage.index] += sum([i % size == 0 or i == iterations for size in sizes for i in range(1, iterations + 1)])


def _stage_of(node: Inner) -> int:
    while isinstance(node, (Reduction, Update)):
        node = node.inner
    return node.frame.r.stage.index


def frames_of(phase: Phase) -> dict[int, Frame]:
    """The frames of the stages of a phase in the bodies of whole iterations."""
    found: dict[int, Frame] = {phase.stage: phase.launch.frame}

    def visit(body: Body) -> None:
        stages, node = [*body.stages], body.inner
        while isinstance(node, (Reduction, Update)):
            node = node.inner
        if isinstance(node, Loop):
            stages += [copy.compute for copy in node.pipeline.copies] if node.pipeline is not None else []
            visit(node.body)
        while stages:
            c = stages.pop()
            stages += c.before
            if c.body is not None and c.turns is None:
                found[c.stage] = c.body.frame
                visit(c.body)
    visit(phase.launch.body)
    return found


def check(state: Scheduler) -> Counter[str]:
    """Compare the counts of a state's stages with what its loops do. Returns how many loops with parts, skips, blocks and pipelines were
    compared."""
    tree, nests, seen = loop_tree(state), loop_nest(state).stages, Counter[str]()
    runs = stage_runs(state.kernel, nests, tree)
    assert set(runs) == set(nests)
    assert sorted(runs, reverse=True) == list(runs), "readers come first"
    for phase in tree:
        if phase.kind is PhaseKind.COMBINE:
            continue
        launched = {loop.piece.row for loop in phase.launch.loops}
        tiles = {s: tuple([prod([p.extent for p in own if p.row not in launched]) for own in nest.axes]) for s, nest in nests.items()}
        parts = [Runner(phase, tiles, part) for part in range(phase.split.parts if phase.split else 1)]
        for part in parts:
            part.run()
        frames = frames_of(phase)
        for s in set().union(*[part.computed for part in parts]):
            seen += check_stage(phase, runs[s], frames.get(s), parts)
    return seen


def check_stage(phase: Phase, at: StageRuns, frame: Frame | None, parts: Sequence[Runner]) -> Counter[str]:
    """Compare the counts of one stage. `frame`: its loops; None for a copy that all threads share."""
    s, seen, loops = at.nest.r.stage.index, Counter[str](), list(at.own)
    skips = any(loop.row in part.skipping for loop in at.own for part in parts)
    for number, loop in enumerate(frame.loops if frame is not None else ()):
        if s == phase.stage and number < phase.launch.num_loops:
            if loop.piece.extent > 1:
                found = loops.pop(0)
                assert found == (loop.piece.row, ((loop.axis, loop.piece.stride),), loop.piece.extent, True, 0)
            continue
        entered = sum([part.entered[s, number] for part in parts])
        if loop.piece.extent == 1:
            continue
        found = loops.pop(0)
        assert found[:2] == (loop.piece.row, ((loop.axis, loop.piece.stride),)) and not found.is_launched
        mean = sum([part.iterations[s, number] for part in parts]) / entered * (found.parts or 1)
        assert abs(mean - found.times) <= 0.5 if any(found.row in part.skipping for part in parts) else mean == found.times
        seen["parts"] += found.parts > 1
        seen["skips"] += found.times < loop.piece.extent
        if found.parts:
            assert found.in_part == max([part.iterations[s, number] / part.entered[s, number] for part in parts])
    assert not loops, "every loop is counted"
    around_skips = any(loop.row in part.skipping for loop in at.around for part in parts)
    if not around_skips:
        # A stage outside of the loop that the parts share is computed once for each part.
        assert sum([part.computed[s] for part in parts]) == at.times * (1 if any(loop.parts for loop in at.around) else len(parts))
    if not (skips or around_skips or (phase.split is not None and s != phase.stage)):
        of_launch = prod([loop.times for loop in at.own if loop.is_launched]) * (at.times if s != phase.stage else 1.0)
        assert parts[0].ends[s] == at.block_ends * of_launch
        assert parts[0].updates[s] == at.updates * of_launch
        seen["blocks"] += at.block_ends > 0
        seen["updates"] += at.updates > 0
    seen["pipelines"] += at.copy is not None
    return seen


def barriers_in_linear(code: Sequence[Instruction]) -> float | None:
    """Return how many barriers one iteration of a phase's launch meets; None if a loop around one has bounds that vary."""
    around, found = list[float | None](), 0.0
    for i in code:
        if i.op == "LOOP":
            start, stop = (code[n].arg if code[n].op == "CONST" else None for n in i.src[:2])
            around.append(None if start is None or stop is None else -(-(stop - start) // i.arg))
        elif i.op == "ENDLOOP":
            around.pop()
        elif i.op == "BARRIER":
            if None in around[1:]:
                return None
            found += prod(around[1:])
    return found


@pytest.mark.parametrize("target", [TOY, replace(TOY, bulk_row=16)])
def test_barriers_are_those_of_linear(target: Target) -> None:
    """The stages of a phase together have the barriers that its instructions run, as far as no sum has a tail."""
    counted = Counter[str]()
    for name in dict.fromkeys([*list(CORPUS)[::4], *[name for name in CORPUS if name.startswith("gemm")]]):
        base, rng = Scheduler(Kernel(CORPUS[name]()), target), random.Random(f"barriers {name}")
        for state in (group_state(rng, base, 8), pipelined_state(rng, base), pipelined_state(rng, base)):
            tree = loop_tree(state)
            try:
                code = lower(state).code
            except KernelOptError:      # too much shared memory
                continue
            runs, placement = stage_runs(state.kernel, loop_nest(state).stages, tree), place_stages(state)
            for phase, instructions in zip(tree, code, strict=True):
                found = barriers_in_linear(instructions)
                if phase.kind is PhaseKind.COMBINE or found is None or "Tail(" in str(phase):
                    continue
                own = [at for s, at in runs.items() if phase_of(placement, s) == phase.stage]
                assert found == sum([at.barriers * prod([loop.in_part for loop in at.around if not loop.is_launched]) for at in own]), name
                for kind in ("Pipeline", "is_bulk=True", "through_memory=True"):
                    counted[kind] += found > 0 and kind in str(phase)
    assert counted["Pipeline"] > 5 and counted["through_memory=True"] > 0 and (counted["is_bulk=True"] > 0) == (target.bulk_row > 0)


def long_sums() -> Tensor:
    return data(8, 1000).sum(1)


@pytest.mark.parametrize("target, build, chain, kind", [
    ("avx2", lambda: kernel_of(long_sums()), "", "blocks"),
    ("avx2", lambda: kernel_of(data(1 << 14).sum()), "UPCAST(r0, 16)", "blocks"),
    ("avx512", lambda: kernel_of(data(1 << 13).sum()), "UPCAST(r0, 8) THREAD(r0, 4)", "blocks"),
    ("avx512", lambda: kernel_of(data(10).sum()), "THREAD(r0, 4)", "parts"),
    ("gpu", lambda: kernel_of(data(1 << 13).sum()), "GROUP(r0, 8) SPLITK(r0, 7)", "blocks"),
    ("avx2", lambda: kernel_of(data(6, 900).sum(1)), "ORDER(out, r0, o0)", "updates"),
    ("avx2", lambda: kernel_of(conv(2, 3, 5, 5, padding=4)), "", "skips"),
    ("gpu", lambda: kernel_of(data(40, 64) @ data(64, 40)),
     "UPCAST(o1, 4) LOCAL(o1, 10) LOCAL(o0, 5) TILE(r0, 16) STAGE(s0, r0) STAGE(s1, r0) PIPELINE(r0, 2)", "pipelines"),
])
def test_counts(target: str, build: object, chain: str, kind: str) -> None:
    assert callable(build)
    assert check(apply_opts(Scheduler(Kernel(build()), TARGETS[target]), parse_chain(chain)))[kind] > 0


def test_blocks_of_a_causal_mask() -> None:
    kernel = online(Kernel(kernel_of(attention(1, 24, 64, 4, 4, causal=True))), 8).kernel
    assert check(Scheduler(kernel, GPU))["skips"] == 1


@pytest.mark.parametrize("name", a_half(TARGETS))
def test_counts_of_random_chains(name: str) -> None:
    """Kernels of ENDED, whose extents depend on a variable, run at its largest value."""
    target: Target = TARGETS[name]
    compared, kernels = 0, CORPUS | ENDED
    for kernel_name, build in kernels.items():
        kernel = Kernel(build())
        if kernel.library_kernel is not None:
            continue
        for seed in range(chains(0.1)):
            rng = random.Random(f"runs {kernel_name} {seed}")
            start, length = Scheduler(kernel, target), rng.randint(1, 8)
            state = group_state(rng, start, length) if target.has_groups else random_state(rng, start, length)
            try:
                check(state)
                compared += 1
            except (KernelOptError, TooLong):
                continue
            except AssertionError as e:
                raise AssertionError(f"{kernel_name}: {[o.to_json() for o in state.applied_opts]}") from e
    assert compared >= len(kernels) // 3


@pytest.mark.parametrize("name", a_half(CORPUS))
def test_tails_and_prefetches_change_no_count(name: str) -> None:
    kernel = Kernel(CORPUS[name]())
    for seed in range(8):
        rng = random.Random(f"{name} uncounted {seed}")
        state = random_state(rng, Scheduler(kernel, rng.choice([AVX2, replace(AVX512, threads=4)])), rng.randint(0, 10))
        nests = loop_nest(state).stages
        assert stage_runs(kernel, nests, counted_tree(TreeMaker(state))) == stage_runs(kernel, nests, loop_tree(state)), state
