"""The Tensor object itself: memory, conversion to numbers, realisation with an interpreter instead of the compiler, assign, repr."""
from __future__ import annotations

import sys
import types
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

import svod
from svod.core.graph import graph
from svod.core.graph.buffer import buffer_of
from svod.core.graph.shapes import shape_of
from svod.core.graph.storage import base_of, is_made_anew, storage_of
from svod.core.ir.origin import origin_of, scope
from svod.core.ir.uop import Ops, UOp
from svod.errors import DTypeError, ShapeError, UnsupportedError
from svod.tensor import Tensor, ufuncs
from svod.tensor.base import Array
from svod.tensor.realize import last_contents
from svod.tensor.replacement import replace_nodes
from tests.graph_reference import evaluate_graph


class Interpreter(types.ModuleType):
    """Acts on tensors like svod.tracing.graphs, with the reference interpreter: all reads first, then the writes."""

    def __init__(self) -> None:
        super().__init__("svod.tracing.graphs")
        self.batches: list[int] = []

    def realize_tensors(self, tensors: list[Tensor], config: object = None) -> None:
        self.batches.append(len(tensors))
        values = [np.array(evaluate_graph(t.uop)) for t in tensors]
        mapping: dict[UOp, UOp] = last_contents([t.uop for t in tensors])
        contents = [(storage, evaluate_graph(content)) for content, storage in mapping.items()]
        for storage, content in contents:
            buffer_of(storage).array[:] = content
        for t, value in zip(tensors, values, strict=True):
            base = base_of(t.uop)
            there = base.op is Ops.AFTER and not is_made_anew(storage_of(base))
            target = storage_of(base) if there else graph.buffer(t.dtype, t.numel())
            buffer_of(target).array[:] = value.ravel()
            mapping[base] = graph.reshape(target, shape_of(base))
        replace_nodes(mapping)


@pytest.fixture(autouse=True)
def interpreter(monkeypatch: pytest.MonkeyPatch) -> Iterator[Interpreter]:
    stand_in = Interpreter()
    monkeypatch.setitem(sys.modules, "svod.tracing.graphs", stand_in)
    yield stand_in


def test_contiguous_arrays_are_not_copied() -> None:
    a = np.arange(6, dtype=np.float32).reshape(2, 3)
    t = Tensor(a)
    assert t.is_realized and np.shares_memory(buffer_of(base_of(t.uop)).array, a)
    a[0, 0] = 7
    assert t.numpy()[0, 0] == 7
    assert not np.shares_memory(t.numpy(), a)
    assert np.shares_memory(np.asarray(t, copy=False), a)
    transposed = Tensor(a.T)
    a[0, 0] = 8
    assert transposed.numpy()[0, 0] == 7


def test_realize_computes_once_and_every_holder_sees_the_buffer(interpreter: Interpreter) -> None:
    x = Tensor([1.0, 2.0, 3.0])
    y = x * 2
    z, alias = y + 1, y.reshape(3, 1)
    assert not y.is_realized
    y.realize()
    assert y.is_realized and alias.is_realized
    assert base_of(z.uop.src[0]).op is Ops.BUFFER
    np.testing.assert_array_equal(z.numpy(), [3, 5, 7])
    y.realize()
    assert interpreter.batches == [1, 1]


def test_a_batch_is_one_schedule_and_constants_need_none(interpreter: Interpreter) -> None:
    x = Tensor([1.0, 2.0])
    pair = [x + 1, x * 3, Tensor.zeros(2), x]
    Tensor.realize_batch(pair)
    assert interpreter.batches == [2]
    np.testing.assert_array_equal(Tensor.zeros(2, 3).numpy(), np.zeros((2, 3)))
    assert Tensor.full((2,), 2.5, "bfloat16").numpy().tolist() == [2.5, 2.5]
    assert Tensor.zeros(0, 2, dtype="bfloat16").numpy().shape == (0, 2)
    Tensor.realize_batch([])
    assert interpreter.batches == [2]


def test_numbers() -> None:
    t = Tensor([[1, 2], [3, 4]])
    assert t.tolist() == [[1, 2], [3, 4]] and t[1, 0].item() == 3
    assert isinstance(t[0, 0].item(), int) and float(t[0, 1]) == 2.0 and int(t[1, 1]) == 4
    assert bool(Tensor(1.0)) and not bool(Tensor([False]))
    assert np.asarray(t + 1).tolist() == [[2, 3], [4, 5]]
    assert np.asarray(t, dtype=np.float64).dtype == np.float64
    np.testing.assert_allclose(t.float() / 2, [[0.5, 1], [1.5, 2]])
    assert Tensor([1.5, -2.25], dtype="bfloat16").numpy().tolist() == [1.5, -2.25]
    with pytest.raises(ShapeError, match="exactly one"):
        t.item()
    with pytest.raises(ShapeError, match="ambiguous"):
        bool(t)


def test_facts() -> None:
    t = Tensor.zeros(2, 3, dtype="float16")
    assert (t.shape, t.ndim, t.dim(), t.numel(), t.nbytes, t.size(), t.size(-1)) == ((2, 3), 2, 2, 6, 12, (2, 3), 3)
    assert t.device == "CPU" and t.to("cpu") is t and t.half() is t
    assert [f(t).dtype.name for f in (Tensor.float, Tensor.double, Tensor.int, Tensor.long, Tensor.bool, Tensor.bfloat16)] == [
        "float32", "float64", "int32", "int64", "bool", "bfloat16"]
    with pytest.raises(UnsupportedError, match="no device 'nonsense'"):
        t.to("nonsense")


def test_tensors_are_hashed_by_identity() -> None:
    a, b = Tensor([1, 2]), Tensor([1, 2])
    assert len({a, b}) == 2 and a in {a: 1}


def test_the_same_expression_is_the_same_node() -> None:
    x = Tensor([1.0, 2.0])
    assert (x + 1).exp().uop is (x + 1).exp().uop


def test_repr_says_shape_dtype_and_state() -> None:
    assert repr(Tensor([[1.0, 2.0]])) == "<Tensor float32[1, 2] realized [[1., 2.]]>"
    assert repr(Tensor.zeros(3)) == "<Tensor float32[3] constant 0.0>"
    assert repr(Tensor(np.arange(100)).realize()) == "<Tensor int64[100] realized [ 0,  1, ..., 98, 99]>"
    assert repr(Tensor([1.5], dtype="bfloat16")) == "<Tensor bfloat16[1] realized [1.5]>"
    assert repr(Tensor.empty(1 << 40)) == f"<Tensor float32[{1 << 40}] realized>"      # showing it allocates no memory
    lazy = repr(Tensor([1.0]).exp())
    assert lazy.startswith("<Tensor float32[1] lazy EXP from ") and "test_tensor.py:" in lazy


def test_what_python_and_numpy_ask_of_a_value() -> None:
    t = Tensor([[1.0, 2.0], [3.0, 4.5]])
    assert (3.0 in t, 5 in t, t == None, t != "auto") == (True, False, False, True)  # noqa: E711
    assert round(t.mean(), 1) == 2.6 and list(range(4))[Tensor(2)] == 2 and [v.tolist() for v in divmod(Tensor([7]), 4)] == [[1], [3]]
    assert np.mean(t) == 2.625 and np.max(t, axis=0).tolist() == [3, 4.5] and np.concatenate([t, np.ones((1, 2))]).shape == (3, 2)
    lazy = t + 1
    assert np.shape(lazy) == (2, 2) and np.ndim(lazy) == 2 and not lazy.is_realized and t.cpu() is t
    with pytest.raises(DTypeError, match="neither an index nor a count"):
        range(t.sum())  # type: ignore[call-overload]
    for name, match in (("add_", r"x = x.add\(…\)"), ("backward", "does not train"), ("cuda", "use to"), ("foo", "attribute 'foo'$")):
        with pytest.raises(AttributeError, match=match):
            getattr(t, name)
    with pytest.raises(AttributeError, match=r"Tensor\.cat"):
        svod.cat  # noqa: B018


def test_numpys_functions_with_a_tensor_method_of_their_name_are_in_the_table() -> None:
    methods = [getattr(np, name) for name in dir(np) if callable(getattr(Tensor, name, None))]
    names = {f.__name__ for f in methods if isinstance(f, np.ufunc)}
    assert names <= {*ufuncs._OPERATORS, *ufuncs._METHODS}, "np.NAME(t) would be refused although t.NAME() exists"


def test_numpys_functions_of_elements_are_the_tensors() -> None:
    """Each ufunc of the table against NumPy, on tensors, and on tensors with arrays or numbers on either side; all results are lazy."""
    rng = np.random.default_rng(0)
    a, b = (rng.uniform(0.1, 0.9, (3, 3)).astype(np.float32) for _ in range(2))
    whole = rng.integers(1, 7, (3, 3)).astype(np.int32)
    results: list[Tensor] = []
    wanted: list[Array] = []
    for name in (*ufuncs._OPERATORS, *ufuncs._METHODS):
        function: Any = getattr(np, name)
        x, y = (whole, whole) if name == "invert" or name.startswith("bitwise") or name.endswith("shift") else (a, b)
        if name == "arccosh":
            x = x + 1
        for given in ([(Tensor(x),)] if function.nin == 1 else [(x, Tensor(y)), (Tensor(x), y), (Tensor(x), 2), (2, Tensor(y))]):
            if name == "matmul" and any(isinstance(g, int) for g in given):
                continue
            found = function(*given)
            want = function(*(t.numpy() if isinstance(t, Tensor) else t for t in given))
            for f, w in zip(found, want, strict=True) if isinstance(want, tuple) else ((found, want),):
                assert isinstance(f, Tensor) and (not f.is_realized or name == "positive"), name
                results.append(f)
                wanted.append(w)
    Tensor.realize_batch(results)
    for f, w in zip(results, wanted, strict=True):
        np.testing.assert_allclose(f.numpy(), w, rtol=1e-5, atol=1e-6)
    t = Tensor(a)
    for refused, match in ((lambda: np.gcd(t, t), r"no such operation; apply it to the values, np\.gcd\(t\.numpy\(\)\)"),
                           (lambda: np.add.reduce(t), r"np\.add\.reduce\(t\.numpy\(\), …\)"),
                           (lambda: a.__iadd__(t), r"array \+= t\.numpy\(\)")):
        with pytest.raises(UnsupportedError, match=match):
            refused()


def test_one_number_is_formatted_as_such() -> None:
    t = Tensor([[1.25, 2.5]])
    assert f"{t.sum():.2f} {t.sum().int():3d}" == "3.75   3" and f"{t}" == repr(t)
    with pytest.raises(ShapeError, match=r"'.2f' formats one number, and this is a tensor of shape \(1, 2\)"):
        f"{t:.2f}"


def test_data_that_no_tensor_can_hold() -> None:
    for data, match in ((2**70, "no integer type is wide enough"), ([2**70], "no integer type is wide enough"),
                        ([1, None], "they hold NoneType"), (["a"], "they hold str"), ([1j], "they hold complex"), ({}, "from dict")):
        with pytest.raises(DTypeError, match=match):
            Tensor(data)
    assert Tensor(2**63).dtype.name == Tensor([2**63]).dtype.name == "uint64" and Tensor(range(3)).tolist() == [0, 1, 2]


def test_origins_are_text_that_can_be_stored() -> None:
    """A file's name may have any bytes, which Python represents as lone surrogates."""
    made: dict[str, Tensor] = {}
    exec(compile("made['y'] = x.exp()", "mödel\udcff.py", "exec"), {"x": Tensor([1.0]), "made": made})
    assert origin_of(made["y"].uop) == "mödel\\udcff.py:1" and "mödel\\udcff.py:1" in repr(made["y"])


def test_origins_are_lines_or_module_paths() -> None:
    x = Tensor([[1.0, 2.0]])
    y = x.softmax(-1)
    assert (origin_of(y.uop) or "").endswith("test_tensor.py:" + str(_line_of("y = x.softmax(-1)")))
    for reduce in y.uop.walk(Ops.REDUCE_AXIS):
        assert "test_tensor.py" in (origin_of(reduce) or "")
    with scope("layer1.0"), scope("conv1"):
        z = x.sigmoid()
    assert origin_of(z.uop) == "layer1.0.conv1"
    # the first origin is kept, and nodes below keep theirs
    assert origin_of(x.sigmoid().uop) == "layer1.0.conv1" and origin_of(z.relu().uop) != "layer1.0.conv1"


def _line_of(text: str) -> int:
    with open(__file__, encoding="utf-8") as f:
        return next(i for i, line in enumerate(f, 1) if line.strip() == text)


def test_assign_writes_into_the_memory() -> None:
    a = np.zeros(4, np.float32)
    t = Tensor(a)
    matrix = t.reshape(2, 2)
    before = t + 1
    t.assign(t + 5)
    assert not t.is_realized and not matrix.is_realized
    np.testing.assert_array_equal(t.numpy(), np.full(4, 5))
    np.testing.assert_array_equal(a, np.full(4, 5))
    np.testing.assert_array_equal(matrix.numpy(), np.full((2, 2), 5))
    # made before the assignment: the old content
    np.testing.assert_array_equal(before.numpy(), np.ones(4))
    t.assign(1).assign(t * 3)
    np.testing.assert_array_equal(t.numpy(), np.full(4, 3))
    np.testing.assert_array_equal(a, np.full(4, 3))


def test_assign_casts_broadcasts_and_respects_read_only_arrays() -> None:
    a = np.zeros((2, 3), np.int32)
    t = Tensor(a).assign(np.array([1.7, 2.0, -1.5]))
    np.testing.assert_array_equal(t.numpy(), [[1, 2, -1]] * 2)
    a.flags.writeable = False
    frozen = Tensor(a)
    frozen.assign(9)
    np.testing.assert_array_equal(frozen.numpy(), np.full((2, 3), 9))
    np.testing.assert_array_equal(a, [[1, 2, -1]] * 2)
    with pytest.raises(ShapeError, match=r"assign of shape \(4,\)"):
        t.assign(np.zeros(4))
    fresh = Tensor.empty(2).assign(3.0)
    assert fresh.numpy().tolist() == [3, 3]


def test_contiguous_and_clone() -> None:
    t = Tensor([[1, 2], [3, 4]])
    assert t.contiguous() is t and t.T.contiguous().uop.op is Ops.CONTIGUOUS
    copy = t.clone()
    t.assign(0)
    t.realize()
    assert copy.tolist() == [[1, 2], [3, 4]] and t.detach().tolist() == [[0, 0], [0, 0]]


@pytest.mark.slow
def test_memory_lives_as_long_as_a_tensor_needs_it() -> None:
    import gc
    import weakref
    t = Tensor([1.0, 2.0])
    memory = weakref.ref(buffer_of(base_of(t.uop)))
    y = t + 1
    del t
    gc.collect()
    assert memory() is not None
    del y
    gc.collect()
    assert memory() is None
