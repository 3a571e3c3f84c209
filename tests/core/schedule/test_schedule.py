"""Schedules against the graph interpreter: random graphs, fixed rules of the kernel cut, order of ASSIGNs."""
from __future__ import annotations

import random
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

from svod.core.graph import graph
from svod.core.graph.shapes import shape_of, size_of
from svod.core.ir.dtype import dtypes
from svod.core.ir.uop import Ops, UOp
from svod.core.schedule.cut import MAX_DEPTH, MAX_READS, Cut
from svod.core.schedule.schedule import Schedule, create_schedule
from svod.errors import ScheduleError
from svod.tensor import Tensor
from svod.tensor.realize import realize_tensors
from tests.core.corpus import attention, data
from tests.core.scheduling import run_schedule
from tests.draws import a_quarter
from tests.graph_reference import evaluate_graph

Array = np.ndarray[Any, np.dtype[Any]]
EXTENTS = (1, 2, 3, 4, 5, 6)


class RandomGraph:
    """A random graph of int32 nodes, whose arithmetic is exact, that grows by random operations."""

    def __init__(self, seed: int):
        self.rng = random.Random(seed)
        self.contents: dict[UOp, Array] = {}
        self.nodes: list[UOp] = [self.leaf(self.shape()) for _ in range(2)]

    def shape(self) -> tuple[int, ...]:
        return tuple(self.rng.choice(EXTENTS) for _ in range(self.rng.randint(0, 3)))

    def leaf(self, shape: tuple[int, ...]) -> UOp:
        size = int(np.prod(shape))
        b = graph.buffer(dtypes.int32, size)
        self.contents[b] = np.random.default_rng(self.rng.randrange(1 << 30)).integers(-9, 9, size).astype(np.int32)
        return graph.reshape(b, shape)

    def pick(self) -> UOp:
        return self.rng.choice(self.nodes[-5:])

    def partner(self, x: UOp) -> UOp:
        """Return a node of x's shape: an existing node, the broadcast reduction of one, or a new buffer."""
        shape = shape_of(x)
        same = [n for n in self.nodes if shape_of(n) == shape]
        kind = self.rng.random()
        if kind < 0.4:
            return self.rng.choice(same)
        if kind < 0.7 and shape:
            axes = [a for a in range(len(shape)) if self.rng.random() < 0.5]
            return graph.expand(graph.reduce_axis(self.rng.choice(same), self.rng.choice(["ADD", "MAX", "MIN"]), axes), shape)
        return graph.broadcast(self.leaf(tuple(n if self.rng.random() < 0.6 else 1 for n in shape)), shape)

    def elementwise(self, x: UOp) -> UOp:
        op = self.rng.choice([Ops.ADD, Ops.SUB, Ops.MUL, Ops.MAX, Ops.MIN, Ops.XOR])
        if self.rng.random() < 0.2:
            return graph.alu(Ops.WHERE, graph.alu(Ops.CMPLT, x, self.partner(x)), x, self.partner(x))
        return graph.alu(op, x, self.partner(x))

    def reshape(self, x: UOp) -> UOp:
        n, shape = size_of(x), []
        while n > 1:
            d = self.rng.choice([d for d in range(2, n + 1) if n % d == 0])
            shape.append(d)
            n //= d
        if self.rng.random() < 0.4:
            shape.insert(self.rng.randint(0, len(shape)), 1)
        self.rng.shuffle(shape)
        return graph.reshape(x, shape)

    def movement(self, x: UOp) -> UOp:
        rng, shape = self.rng, shape_of(x)
        match rng.randrange(7):
            case 0:
                return self.reshape(x)
            case 1:
                return graph.permute(x, rng.sample(range(len(shape)), len(shape)))
            case 2:
                return graph.pad(x, [(rng.randint(0, 2), rng.randint(0, 2)) for _ in shape], rng.choice([0, 0, 7]))
            case 3:
                begins = [rng.randrange(n) for n in shape]
                return graph.shrink(x, [(b, rng.randint(b + 1, n)) for b, n in zip(begins, shape, strict=True)])
            case 4:
                return graph.flip(x, [a for a in range(len(shape)) if rng.random() < 0.5])
            case 5:
                return graph.expand(graph.reshape(x, (*shape, 1)), (*shape, rng.choice([2, 3])))
            case _:
                windows = [(a, 2, rng.choice([1, 2]), 1) for a, n in enumerate(shape) if n > 2 and rng.random() < 0.5]
                return graph.window(x, windows)

    def product(self, x: UOp) -> UOp:
        shape = shape_of(x)
        if not shape:
            return x
        k, n = shape[-1], self.rng.choice([2, 3, 5])
        w = self.leaf((n, k))
        wide = (*shape[:-1], n, k)
        a = graph.expand(graph.reshape(x, (*shape[:-1], 1, k)), wide)
        b = graph.broadcast(w, wide)
        y = graph.reduce_axis(graph.alu(Ops.MUL, a, b), "ADD", (len(wide) - 1,))
        return graph.reshape(y, wide[:-1])

    def gather(self, x: UOp) -> UOp:
        shape = shape_of(x)
        if not shape:
            return x
        axis = self.rng.randrange(len(shape))
        index = self.leaf(self.rng.choice([(2,), (3,), (2, 2), ()]))
        index = graph.alu(Ops.SUB, index, graph.full(shape_of(index), 2, dtypes.int32))  # some are out of range
        return graph.gather(x, index, axis)

    def library_kernel(self, x: UOp) -> UOp:
        """Add a SCAN, SORT, ARGSORT, TOPK or SCATTER: kernels into which nothing is fused."""
        shape = shape_of(x)
        if not shape:
            return x
        axis = self.rng.randrange(len(shape))
        n = shape[axis]
        kind = self.rng.choice(["SCAN", "SCAN", "SORT", "ARGSORT", "TOPK", "SCATTER"])
        if kind in ("SORT", "ARGSORT", "TOPK"):
            options = (self.rng.randint(1, n), self.rng.random() < 0.5) if kind == "TOPK" else (self.rng.random() < 0.5,)
            order = [a for a in range(len(shape)) if a != axis] + [axis]
            moved = graph.permute(x, order)
            rows = graph.reshape(moved, (-1, n))
            found = graph.library_kernel(kind, options, x.dtype if kind == "SORT" else dtypes.int64, rows)
            return graph.cast(graph.reshape(found, (*shape_of(moved)[:-1], -1)), dtypes.int32)
        box = (int(np.prod(shape[:axis])), n, int(np.prod(shape[axis + 1:])))
        boxed = graph.reshape(x, box)
        if kind == "SCAN":
            return graph.reshape(graph.library_kernel(kind, (self.rng.choice(["ADD", "MUL", "MAX", "MIN"]),), dtypes.int32, boxed), shape)
        places = (box[0], 3, box[2])
        reduction = self.rng.choice(["SET", "ADD", "MAX"])
        return graph.reshape(graph.library_kernel(kind, (reduction,), dtypes.int32, boxed, self.leaf(places), self.leaf(places)), shape)

    def grow(self, steps: int) -> None:
        for _ in range(steps):
            x = self.pick()
            make = self.rng.choices([self.elementwise, self.movement, self.product, self.gather, self.reduce, graph.contiguous, self.count,
                                     self.library_kernel], [6, 6, 2, 1, 3, 0.5, 1, 0.5])[0]
            y = make(x)
            if size_of(y) <= 400:
                self.nodes.append(y)

    def reduce(self, x: UOp) -> UOp:
        rank = len(shape_of(x))
        axes = [a for a in range(rank) if self.rng.random() < 0.5]
        y = graph.reduce_axis(x, self.rng.choice(["ADD", "MAX", "MIN", "MUL"]), axes)
        return graph.reshape(y, [n for n in shape_of(y) if n != 1]) if self.rng.random() < 0.5 else y

    def count(self, x: UOp) -> UOp:
        shape = shape_of(x)
        if not shape:
            return x
        axis = self.rng.randrange(len(shape))
        column = graph.reshape(graph.iota(shape[axis]), [n if a == axis else 1 for a, n in enumerate(shape)])
        if self.rng.random() < 0.5:
            return graph.alu(Ops.ADD, x, graph.expand(column, shape))
        return graph.arg_reduce(x, graph.expand(column, shape), self.rng.choice(["ARGMAX", "ARGMIN"]), [axis])


def check(outputs: list[UOp], contents: dict[UOp, Array]) -> Schedule:
    schedule = create_schedule(graph.sink(*outputs))
    memory = run_schedule(schedule, contents)
    for output, buffer in zip(outputs, schedule.outputs, strict=True):
        np.testing.assert_array_equal(memory[buffer], evaluate_graph(output, contents).ravel())
    for i, call in enumerate(schedule.calls):
        assert all(d < i for d in call.deps)
    return schedule


@pytest.mark.parametrize("seed", a_quarter(range(120)))
def test_random_graphs(seed: int) -> None:
    g = RandomGraph(seed)
    g.grow(4 + seed % 12)
    check([g.nodes[-1], *g.rng.sample(g.nodes, min(len(g.nodes), seed % 3))], g.contents)


def words(tensor: Tensor) -> list[str]:
    return [c.name_hint for c in create_schedule(graph.sink(tensor.uop)).calls]


def block(x: Tensor) -> Tensor:
    y = x.conv2d(data(3, 3, 3, 3), padding=1).batch_norm(data(3), data(3), data(3), data(3)).relu()
    return (y.conv2d(data(3, 3, 3, 3), padding=1).batch_norm(data(3), data(3), data(3), data(3)) + x).relu()


@pytest.mark.parametrize("build, expected", [
    (lambda: data(9, 5).softmax(-1), ["softmax"]),
    (lambda: data(9, 5).softmax(0), ["softmax"]),
    (lambda: (data(9, 5) + 1).log_softmax(-1), ["softmax"]),
    (lambda: data(9, 5).layer_norm(5, data(5), data(5)), ["rows"]),
    (lambda: (data(9, 5) + data(9, 5)).layer_norm(5), ["rows"]),
    (lambda: data(9, 5).var(1), ["rows"]),
    (lambda: data(9, 5).rms_norm(5, data(5)), ["reduce"]),
    (lambda: data(9, 5).argmax(1), ["rows"]),
    (lambda: attention(6, 4), ["attention"]),
    (lambda: attention(6, 4, causal=True), ["attention"]),
    (lambda: (data(9, 5) @ data(5, 7) + data(7)).gelu(), ["gemm"]),
    (lambda: data(9, 5) @ data(5, 7) + data(9, 7), ["gemm"]),
    (lambda: (data(9, 5) @ data(5, 7)).relu() @ data(7, 3), ["gemm", "gemm"]),
    (lambda: data(9, 5).layer_norm(5) @ data(5, 7), ["rows", "gemm"]),
    (lambda: (data(9, 5) @ data(5, 7)).softmax(-1), ["gemm", "softmax"]),
    (lambda: (data(9, 5) @ data(5, 7) + data(9, 7)).layer_norm(7), ["gemm", "rows"]),
    (lambda: data(9, 5) @ data(5, 7) + data(9, 4) @ data(4, 7), ["gemm", "gemm"]),
    (lambda: data(1, 3, 8, 8).conv2d(data(4, 3, 3, 3)).relu().mean((2, 3)), ["conv", "reduce"]),
    (lambda: block(block(data(1, 3, 8, 8))), ["conv", "conv", "conv", "conv"]),
    (lambda: data(3, 70000).softmax(-1), ["reduce", "elementwise", "reduce", "elementwise"]),
    (lambda: (data(9, 5) @ data(5, 7)).pad((1, 1)), ["gemm", "copy"]),
    (lambda: data(3, 4).sum(1).sum(0), ["reduce"]),
    (lambda: data(1, 2, 4, 4).interpolate((16, 16), mode="bilinear"), ["gather", "gather"]),
    (lambda: data(1, 2, 4, 4).interpolate((5, 5), mode="bilinear"), ["gather"]),
    (lambda: data(1, 2, 4, 1).interpolate((16, 16), mode="bilinear"), ["gather"]),
    (lambda: data(1, 2, 1, 1).interpolate((16, 16), mode="bilinear"), ["copy"]),
    (lambda: (data(5, 4) * 2 + 1).take(Tensor(np.arange(40) % 5), 0), ["gather"]),
    (lambda: (data(5, 4).exp() * 2).take(Tensor(np.arange(40) % 5), 0), ["elementwise", "gather"]),
    (lambda: data(5, 4).mish().take(Tensor(np.arange(15) % 5), 0), ["elementwise", "gather"]),
    (lambda: data(5, 4).mish().take(Tensor(np.arange(6) % 5), 0), ["gather"]),
    (lambda: data(5, 4).mish().mish().mish().take(Tensor(np.arange(8) % 5), 0), ["elementwise", "gather"]),
    (lambda: data(5, 4).exp().take(Tensor(np.arange(20) % 5), 0), ["gather"]),
])
def test_kernel_cut(build: Any, expected: list[str]) -> None:
    assert words(build()) == expected


def test_a_cheap_value_is_computed_twice_and_a_dear_one_is_kept() -> None:
    x, w = data(9, 5), data(5, 7)
    cheap, dear = x.relu(), (x.exp() + 1).log()
    assert len(create_schedule(graph.sink((cheap @ w).uop, cheap.sum(1).uop)).calls) == 2
    assert len(create_schedule(graph.sink((dear @ w).uop, dear.sum(1).uop)).calls) == 3


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_conversions_of_floats_make_no_value_dear(dtype: str) -> None:
    """In a chain in which each step computes in float32 and rounds, as in PyTorch programs, no step is stored because of its
    conversions."""
    x, w = data(9, 5).cast(dtype).contiguous(), data(5, 7).cast(dtype).contiguous()
    scaled = x.cast("float32").mul(2.0).cast(dtype)
    cheap = scaled.cast("float32").add(1.0).cast(dtype)
    stored = 0 if dtype == "float32" else 2     # x and w themselves
    assert len(create_schedule(graph.sink((cheap @ w).uop, cheap.sum(1).uop)).calls) == stored + 2


@pytest.mark.parametrize("narrow", ["bfloat16", "float16"])
def test_memory_keeps_the_narrow_type(narrow: str) -> None:
    """Sums of 16-bit floats are computed in 32 bits: operands are stored in 16 bits and converted by their readers."""
    x, w, v = (data(*shape).cast(narrow).contiguous() for shape in ((9, 5), (5, 7), (7, 4)))
    inner = x @ w
    dear = (inner.exp() + 1).log()
    for out in ((inner @ v), (inner.softmax(-1) @ v), graph.sink((dear @ v).uop, dear.sum(1).uop)):
        sink = out if isinstance(out, UOp) else graph.sink(out.uop)
        calls = create_schedule(sink).calls
        stored = [p.dtype for c in calls for p in c.ast.walk(Ops.PARAM)]
        assert len(calls) >= 4 and {d.itemsize for d in stored} == {2, 4}
        wide = [c for c in calls if any(p.dtype == dtypes.float32 for p in c.ast.walk(Ops.PARAM))]
        assert all(c.name_hint in ("copy", "elementwise") for c in wide), "only the leaves are 32 bits wide"


def test_positions_of_positions_are_other_places() -> None:
    """The elements at p[i] and p[p[i]] are different: each step that reads a value both directly and at positions doubles the number of
    positions that a kernel reads."""
    order = np.array([3, 1, 4, 1, 5, 2, 6, 0])
    t = Tensor(np.random.default_rng(0).standard_normal((8, 8)).astype(np.float32))
    expected, p, steps = t.numpy(), Tensor(order), 24
    for i in range(steps):
        t, expected = t + t.take(p, i % 2), expected + expected.take(order, i % 2)
    kernels = words(t)
    assert set(kernels) == {"gather"} and steps // int(np.log2(MAX_READS)) <= len(kernels) < steps
    np.testing.assert_allclose(t.numpy(), expected, rtol=1e-4)


def test_a_gather_is_eight_operations_deep() -> None:
    """In a chain of gathers each index waits for the one before it and its bounds check: a kernel has at most 16 of them."""
    t, p = Tensor(np.ones((8, 8), np.float32)), Tensor(np.array([3, 1, 4, 1, 5, 2, 6, 0]))
    for i in range(4 * MAX_DEPTH // 8):
        t = t.take(p, i % 2)
    assert words(t).count("gather") == 4


def test_every_kernel_says_why() -> None:
    calls = create_schedule(graph.sink((data(9, 5).layer_norm(5) @ data(5, 7)).uop)).calls
    assert [bool(c.why) for c in calls] == [True, True]
    assert "broadcast" in calls[0].why and calls[1].why == "output"
    assert all("test_schedule.py" in c.origin for c in calls)


def ints(n: int, seed: int = 0) -> Array:
    return np.random.default_rng(seed).integers(-9, 9, n).astype(np.int32)


def test_outputs_without_kernels() -> None:
    b = graph.buffer(dtypes.int32, 12)
    view = graph.reshape(b, (3, 4))
    empty = graph.full((0, 3), 0, dtypes.int32)
    schedule = create_schedule(graph.sink(view, empty, graph.contiguous(view)))
    assert schedule.calls == () and schedule.outputs[0] is b is schedule.outputs[2]
    assert schedule.outputs[1].arg == 0


def test_views_and_constants_are_copied() -> None:
    b = graph.buffer(dtypes.int32, 12)
    view = graph.permute(graph.reshape(b, (3, 4)), (1, 0))
    schedule = check([view, graph.full((2, 3), 5, dtypes.int32), graph.shrink(view, [(1, 3), (0, 2)])], {b: ints(12)})
    assert [c.name_hint for c in schedule.calls] == ["copy", "fill", "copy"]


def test_a_shared_part_is_an_output_once() -> None:
    b = graph.buffer(dtypes.int32, 12)
    x = graph.reduce_axis(graph.reshape(b, (3, 4)), "ADD", (1,))
    schedule = check([x, graph.alu(Ops.ADD, x, x), graph.reshape(x, (3,))], {b: ints(12)})
    assert len(schedule.calls) == 2 and schedule.outputs[0] is schedule.outputs[2]


def test_constants_are_marked() -> None:
    x, w = graph.buffer(dtypes.int32, 12), graph.buffer(dtypes.int32, 12)
    call, = create_schedule(graph.sink(graph.alu(Ops.ADD, x, w)), frozenset((w,))).calls
    assert {call.args[p.arg.slot]: p.arg.constant for p in call.ast.walk(Ops.PARAM)} == {call.args[0]: False, x: False, w: True}


def test_equal_graphs_give_equal_schedules() -> None:
    b, c = graph.buffer(dtypes.int32, 12), graph.buffer(dtypes.int32, 12)

    def build() -> UOp:
        return graph.contiguous(graph.alu(Ops.ADD, graph.contiguous(graph.alu(Ops.MUL, b, c)), c))

    assert create_schedule(graph.sink(build())) == create_schedule(graph.sink(build()))
    assert create_schedule(graph.sink(build()), remember=False) == create_schedule(graph.sink(build()))


def test_assign_is_ordered_after_reads_and_before_later_ones() -> None:
    x, y = graph.buffer(dtypes.int32, 6), graph.buffer(dtypes.int32, 6)
    contents = {x: ints(6, 1), y: ints(6, 2)}
    old = graph.alu(Ops.ADD, x, graph.full((6,), 1, dtypes.int32))
    new = graph.assign(x, y)
    later = graph.alu(Ops.MUL, new, graph.full((6,), 3, dtypes.int32))
    schedule = create_schedule(graph.sink(later, new, old))
    memory = run_schedule(schedule, contents)
    np.testing.assert_array_equal(memory[schedule.outputs[0]], contents[y] * 3)
    np.testing.assert_array_equal(memory[schedule.outputs[2]], contents[x] + 1)
    assert schedule.outputs[1] is x
    np.testing.assert_array_equal(memory[x], contents[y])


def test_assign_in_place_reads_its_own_element() -> None:
    x = graph.buffer(dtypes.int32, 6)
    schedule = create_schedule(graph.sink(graph.assign(x, graph.alu(Ops.ADD, x, x))))
    assert len(schedule.calls) == 1 and schedule.calls[0].args == (x,)
    np.testing.assert_array_equal(run_schedule(schedule, {x: ints(6)})[x], ints(6) * 2)


def test_assign_that_reads_other_elements_goes_through_a_temporary() -> None:
    x = graph.buffer(dtypes.int32, 6)
    schedule = create_schedule(graph.sink(graph.assign(x, graph.flip(x, 0))))
    assert len(schedule.calls) == 2
    np.testing.assert_array_equal(run_schedule(schedule, {x: ints(6)})[x], ints(6)[::-1])


def test_assign_to_a_view() -> None:
    x, y = graph.buffer(dtypes.int32, 12), graph.buffer(dtypes.int32, 4)
    target = graph.shrink(graph.permute(graph.reshape(x, (3, 4)), (1, 0)), [(1, 3), (0, 2)])
    new = graph.assign(target, graph.reshape(y, (2, 2)))
    schedule = create_schedule(graph.sink(new))
    memory = run_schedule(schedule, {x: ints(12), y: ints(4, 5)})
    expected = ints(12).reshape(3, 4).copy()
    expected.T[1:3, :2] = ints(4, 5).reshape(2, 2)
    np.testing.assert_array_equal(memory[x], expected.ravel())
    # the output is the buffer, not a copy of the part
    assert schedule.outputs == (x,) and len(schedule.calls) == 1


def test_two_buffers_are_swapped() -> None:
    x, y = graph.buffer(dtypes.int32, 6), graph.buffer(dtypes.int32, 6)
    schedule = create_schedule(graph.sink(graph.assign(x, y), graph.assign(y, x)))
    memory = run_schedule(schedule, {x: ints(6, 1), y: ints(6, 2)})
    np.testing.assert_array_equal(memory[x], ints(6, 2))
    np.testing.assert_array_equal(memory[y], ints(6, 1))


def test_old_and_new_content_in_one_kernel() -> None:
    x, y = graph.buffer(dtypes.int32, 6), graph.buffer(dtypes.int32, 6)
    both = graph.alu(Ops.SUB, graph.assign(x, y), x)
    schedule = create_schedule(graph.sink(both))
    memory = run_schedule(schedule, {x: ints(6, 1), y: ints(6, 2)})
    np.testing.assert_array_equal(memory[schedule.outputs[0]], ints(6, 2) - ints(6, 1))
    np.testing.assert_array_equal(memory[x], ints(6, 2))


def test_assign_to_what_is_no_buffer_is_refused() -> None:
    x = graph.buffer(dtypes.int32, 6)
    with pytest.raises(ScheduleError, match="ASSIGN to ADD"):
        create_schedule(graph.sink(graph.assign(graph.alu(Ops.ADD, x, x), x)))


def test_long_chains_need_no_recursion() -> None:
    x = node = graph.buffer(dtypes.int32, 3)
    for i in range(3000):
        node = graph.alu(Ops.XOR if i % 2 else Ops.ADD, node, x)
    schedule = create_schedule(graph.sink(node))
    assert 3000 // MAX_DEPTH <= len(schedule.calls) <= 3000 // MAX_DEPTH + 1


@pytest.mark.parametrize(("kernel", "stride", "padding"),
                         [(4, 2, 1), (3, 2, 1), (8, 4, 2), (5, 3, 4), (4, 2, 2), (2, 2, 0), (7, 1, 3), (3, 2, 0), (5, 4, 0), (6, 4, 4)])
def test_sums_of_a_transposed_convolution_divide_no_position(kernel: int, stride: int, padding: int) -> None:
    """Positions are neither divided nor taken modulo the stride inside of sums, which would give each lane its own taps."""
    y = data(1, 3, 9, 11).conv_transpose2d(data(3, 4, kernel, kernel), stride=stride, padding=padding)
    kernels = [call.ast for call in create_schedule(graph.sink(y.uop)).calls]
    sums = [ast for ast in kernels if any(ast.walk(Ops.REDUCE))]
    assert sums and not any(any(ast.walk(Ops.IDIV, Ops.MOD)) for ast in sums)
    whole = padding % stride == 0 and all(n % stride == 0 for n in y.shape[2:])
    assert len(kernels) == (1 if whole else 2), "the cut is a kernel of its own only where it begins or ends within a stride"


@pytest.mark.parametrize("shape", [(1, 4, 7, 9), (2, 3, 5, 1), (1, 2, 8, 8)], ids=str)
def test_a_sum_of_one_element_is_its_operand(shape: tuple[int, ...]) -> None:
    """The pool reads the image at positions that are moved, and limits none of them: a sum of one product is no stage of its own."""
    image, weights = np.random.default_rng(5).random(shape, np.float32), np.arange(1, shape[1] + 1, dtype=np.float32)
    y = Tensor(image).conv2d(Tensor(weights).reshape(-1, 1, 1, 1), groups=shape[1]).avg_pool2d(3, 1, padding=1)
    [call] = create_schedule(graph.sink(y.uop)).calls
    assert not any(u.dtype == dtypes.index for u in call.ast.walk(Ops.MAX, Ops.MIN))
    padded = np.pad(image * weights[:, None, None], ((0, 0), (0, 0), (1, 1), (1, 1)))
    rows = sum(padded[:, :, i:i + shape[2]] for i in range(3))
    np.testing.assert_allclose(y.numpy(), sum(rows[..., j:j + shape[3]] for j in range(3)) / 9, rtol=1e-5)


@pytest.mark.parametrize(("costly", "kernels"), [(False, 1), (True, 2)], ids=["cheap", "costly"])
@pytest.mark.parametrize("shape", [(5, 3), (33, 18), (3, 64)], ids=str)
def test_a_stencil_of_a_costly_value_reads_a_buffer(shape: tuple[int, int], costly: bool, kernels: int) -> None:
    """A value that each element of a stencil would compute five times anew is computed once; a cheap one is computed in place."""
    a = np.random.default_rng(4).standard_normal(shape).astype(np.float32)
    y = ((Tensor(a).exp() + 1).log().sigmoid() if costly else Tensor(a).relu() * 2).pad([(1, 1), (1, 1)])
    found = y[1:-1, 1:-1] * 4 - y[:-2, 1:-1] - y[2:, 1:-1] - y[1:-1, :-2] - y[1:-1, 2:]
    assert len(words(found)) == kernels
    b = a.astype(np.float64)
    exact = np.pad(1 / (1 + np.exp(-np.log(np.exp(b) + 1))) if costly else np.maximum(b, 0) * 2, 1)
    expected = exact[1:-1, 1:-1] * 4 - exact[:-2, 1:-1] - exact[2:, 1:-1] - exact[1:-1, :-2] - exact[1:-1, 2:]
    np.testing.assert_allclose(found.numpy(), expected, rtol=1e-4, atol=1e-5)


def test_the_cut_looks_at_each_step_of_a_recurrence_equally_often(monkeypatch: pytest.MonkeyPatch) -> None:
    """A state that is a sum with the last state has all states below it."""
    visited, cone = [0], Cut.cone

    def counting(self: Cut, u: UOp, realised: dict[UOp, str]) -> Iterator[UOp]:
        for n in cone(self, u, realised):
            visited[0] += 1
            yield n

    monkeypatch.setattr(Cut, "cone", counting)
    counts = []
    for steps in (60, 120):
        h, w = data(1, 3), data(3, 3)
        for _ in range(steps):
            h = h + (h @ w).tanh() * 0.5
        visited[0] = 0
        create_schedule(graph.sink(h.uop))
        counts.append(visited[0])
    assert counts[1] < 2.5 * counts[0], "four times as many if every step looks at all steps below it"


OPERANDS: dict[str, Any] = {
    "memory": lambda t: t, "a view": lambda t: t.permute(1, 0).permute(1, 0), "computed": lambda t: t * 2,
    "a constant": lambda t: Tensor.full(t.shape, 3.0)}
REDUCTIONS: dict[str, Any] = {
    "max": lambda t: t.max(0), "sum": lambda t: t.sum(0), "prod": lambda t: t.prod(0), "mean": lambda t: t.mean(0)}


@pytest.mark.parametrize("columns", [1, 3])
@pytest.mark.parametrize("operand", OPERANDS.values(), ids=OPERANDS)
@pytest.mark.parametrize("reduce", REDUCTIONS.values(), ids=REDUCTIONS)
def test_a_reduction_of_one_element_is_an_output_of_its_own(reduce: Any, operand: Any, columns: int) -> None:
    """Also where its operand is memory, which the result must not share, and where both are outputs."""
    a = np.random.default_rng(6).random((1, columns), np.float32)
    for dtype in ("float32", "bfloat16"):
        t = Tensor(a, dtype=dtype) if dtype == "float32" else Tensor(a).cast(dtype).realize()
        value = operand(t)
        expected = operand(t).cast("float32").numpy()[0]
        result = reduce(value)
        realize_tensors([value, result])
        np.testing.assert_array_equal(result.cast("float32").numpy(), expected)
        np.testing.assert_array_equal(value.cast("float32").numpy()[0], expected)
