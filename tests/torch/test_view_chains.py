"""Chains of ATen operations that read a value directly and through a view: PyTorch's numbers in float64, and work that grows at most as the
length squared. Each function of the table that moves elements has a chain.

The graphs are those that the translator gets, made without torch.export, so that no operation is decomposed and PyTorch's own work is not
counted."""
from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import pytest

torch = pytest.importorskip("torch", reason="the package torch is not installed")
from torch._subclasses.fake_tensor import FakeTensorMode  # noqa: E402
from torch.fx.passes.fake_tensor_prop import FakeTensorProp  # noqa: E402

from svod.tensor.operations import movement  # noqa: E402
from svod.torch.operations import TABLE, indexing, views  # noqa: E402
from svod.torch.plans import AtenProgram, attributes_of, make_plan  # noqa: E402
from tests.draws import a_quarter  # noqa: E402
from tests.growth import FIRST, LONG, SHORT, check_growth  # noqa: E402

aten = torch.ops.aten
Step = Callable[[Any], Any]
N = 8
X = torch.sin(torch.arange(float(N * N))).reshape(N, N)
ORDER = torch.tensor([3, 1, 4, 1, 5, 2, 6, 0])
GRID = ORDER.expand(N, N).contiguous()


def cut(x: Any, *ends: int) -> Any:
    """Remove the first `ends` elements of each axis, and elements beyond N."""
    for axis, begin in enumerate(ends):
        x = aten.slice.Tensor(x, axis, begin, begin + N)
    return x


def image(x: Any, *extents: int) -> Any:
    return aten.view.default(x, list(extents))


def square(x: Any) -> Any:
    return aten.reshape.default(x, [N, N])


def padded(pad: Any, x: Any) -> Any:
    """Pad x by `pad`, and cut the part that begins one row below and three columns to the left."""
    return aten.squeeze.dim(cut(pad(image(x, 1, N, N), [3, 2, 1, 0]), 0, 0, 2), 0)


def bits(x: Any) -> Any:
    """The bits of float32 numbers as integers."""
    return aten.view.dtype(aten._to_copy.default(x, dtype=torch.float32), torch.int32)


def halves(parts: Any, axis: int = 0) -> Any:
    """Exchange the two halves."""
    return aten.cat.default([parts[1], parts[0]], axis)


def row(x: Any) -> Any:
    """Repeat eight numbers in every row."""
    return aten.expand.default(x, [N, N])


# steps by the name of the operation that they test; each returns a view of eight rows and columns
VIEWS: dict[str, Step] = {
    "aten.view.default": lambda t: square(aten.t.default(aten.view.default(t, [4, 16]))),
    "aten.t.default": aten.t.default,
    "aten.numpy_T.default": aten.numpy_T.default,
    "aten.transpose.int": lambda t: aten.transpose.int(t, 0, 1),
    "aten.permute.default": lambda t: square(aten.permute.default(image(t, 2, 4, 8), [1, 2, 0])),
    "aten.unsqueeze.default": lambda t: square(aten.transpose.int(aten.unsqueeze.default(t, 0), 1, 2)),
    "aten.squeeze.dim": lambda t: aten.squeeze.dim(image(aten.t.default(t), N, 1, N), 1),
    "aten.expand.default": lambda t: row(aten.slice.Tensor(t, 0, 3, 4)),
    "aten.slice.Tensor": lambda t: aten.cat.default([aten.slice.Tensor(t, 0, 1, None, 2), aten.slice.Tensor(t, 0, 0, None, 2)]),
    "aten.select.int": lambda t: row(aten.select.int(t, 1, 2)),
    "aten.split.Tensor": lambda t: halves(aten.split.Tensor(t, 4)),
    "aten.unbind.int": lambda t: halves(aten.unbind.int(image(t, 2, 4, N))),
    "aten.narrow.default": lambda t: aten.cat.default([aten.narrow.default(t, 1, 3, 5), aten.narrow.default(t, 1, 0, 3)], 1),
    "aten.cat.default": lambda t: cut(aten.cat.default([t, aten.t.default(t)]), 3),
    "aten.stack.default": lambda t: cut(image(aten.stack.default([t, aten.t.default(t)], 1), 2 * N, N), 5),
    "aten.constant_pad_nd.default": lambda t: cut(aten.constant_pad_nd.default(t, [1, 0, -1, 2], 0.5), 1, 0),
    "aten.reflection_pad2d.default": lambda t: padded(aten.reflection_pad2d.default, t),
    "aten.replication_pad2d.default": lambda t: padded(aten.replication_pad2d.default, t),
    "aten.unfold.default": lambda t: square(aten.reshape.default(aten.unfold.default(t, 0, 2, 2), [4, 16])),
    "aten.as_strided.default": lambda t: aten.as_strided.default(aten.clone.default(t), [N, N], [1, 7], 0),
    "aten.repeat_interleave.self_int": lambda t: aten.repeat_interleave.self_int(aten.slice.Tensor(t, 0, 0, 4), 2, 0),
    "aten.im2col.default": lambda t: square(aten.im2col.default(image(t, 1, 1, N, N), [2, 2], [1, 1], [0, 0], [2, 2])),
    "aten.flip.default": lambda t: aten.flip.default(t, [0]),
    "aten.roll.default": lambda t: aten.roll.default(t, [3], [1]),
    "aten.repeat.default": lambda t: aten.repeat.default(aten.slice.Tensor(t, 0, 0, 4), [2, 1]),
    "aten.tril.default": aten.tril.default,
    "aten.triu.default": lambda t: aten.triu.default(t, 1),
    "aten.pixel_shuffle.default": lambda t: square(aten.pixel_shuffle.default(image(t, 4, 4, 4), 2)),
    "aten.pixel_unshuffle.default": lambda t: square(aten.pixel_unshuffle.default(image(t, 1, N, N), 2)),
    "aten.diagonal.default": lambda t: row(aten.diagonal.default(t)),
    "aten.embedding.default": lambda t: aten.embedding.default(t, ORDER),
    "aten.index.Tensor": lambda t: aten.index.Tensor(t, [None, ORDER]),
    "aten.index_select.default": lambda t: aten.index_select.default(t, 0, ORDER),
    "aten.gather.default": lambda t: aten.gather.default(t, 1, GRID),
    "aten.take.default": lambda t: row(aten.take.default(t, ORDER)),
    "aten.slice_scatter.default": lambda t: aten.slice_scatter.default(t, aten.slice.Tensor(aten.t.default(t), 0, 0, 3), 0, 2, 5),
    "aten.select_scatter.default": lambda t: aten.select_scatter.default(t, aten.select.int(t, 1, 2), 0, 5),
    "aten.diagonal_scatter.default": lambda t: aten.diagonal_scatter.default(t, aten.select.int(t, 1, 2)),
    "aten.view.dtype": lambda t: aten.view.dtype(bits(t), torch.float32),
}


def program(step: Callable[[Any, int], Any], length: int) -> AtenProgram:
    """A graph of `steps` steps, one after the other. `step` gets a value and the number of the step."""
    def chain(x: Any) -> Any:
        return functools.reduce(step, range(length), x),
    module = torch.fx.symbolic_trace(chain)
    FakeTensorProp(module, FakeTensorMode(allow_non_fake_inputs=True)).propagate(X)
    return AtenProgram("chain", module.graph, attributes_of(module), {})


@pytest.mark.parametrize("name", a_quarter(VIEWS))
def test_a_value_and_a_view_of_it(name: str) -> None:
    """In turn the view and its transpose, which have another order: no two paths through the chain read the same element."""
    view = VIEWS[name]

    def step(t: Any, i: int) -> Any:
        return aten.mul.Scalar(aten.add.Tensor(t, aten.t.default(view(t)) if i % 2 else view(t)), 0.5)
    programs = {length: program(step, length) for length in (FIRST, SHORT, LONG)}

    def run(length: int) -> None:
        plan = make_plan(programs[length], [X], {}, [], None)
        assert not plan.missing, "PyTorch runs nothing of it"
        wanted = functools.reduce(step, range(length), X.double())
        torch.testing.assert_close(plan.run([X])[0].double(), wanted, rtol=0, atol=1e-5 * max(float(wanted.abs().max()), 1e-6))
    check_growth(run)


def test_every_function_that_moves_elements_has_a_chain() -> None:
    modules = {m.__name__ for m in (views, indexing, movement)}
    wanted = {name: op.function for name, op in TABLE.items() if getattr(op.function, "__module__", "") in modules}
    chained = {TABLE[name].function for name in VIEWS}
    assert wanted and not [name for name, function in wanted.items() if function not in chained]
