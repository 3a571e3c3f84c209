"""Every entry of the table on 16-bit floats against PyTorch in float64, rounded once; layers through both entry points, against eager
PyTorch.

An entry runs as a graph of one node, so that the operation is not decomposed, and is evaluated with NumPy.
"""
from __future__ import annotations

import operator
from collections.abc import Callable, Mapping
from itertools import cycle, product
from types import MappingProxyType
from typing import Any, NamedTuple

import pytest

torch = pytest.importorskip("torch", reason="the package torch is not installed")
import torch.nn.functional as F  # noqa: E402

import svod.torch  # noqa: E402
import svod.torch.whole  # noqa: E402
from svod.tensor import Tensor  # noqa: E402
from svod.torch.fallback import FallbackSeconds  # noqa: E402
from svod.torch.memory import DTYPES  # noqa: E402
from svod.torch.operations import TABLE  # noqa: E402
from svod.torch.translate import translate  # noqa: E402
from tests.draws import a_quarter  # noqa: E402
from tests.graph_reference import evaluate_graph  # noqa: E402
from tests.torch.test_operations import Module  # noqa: E402

HALVES = {torch.float16: (1.0, 300.0, 40000.0, 1e-4), torch.bfloat16: (1.0, 300.0, 1e18, 1e-4)}


class Draw:
    """Draws operands of one dtype: float64 tensors whose values the dtype represents."""

    def __init__(self, dtype: Any, magnitude: float) -> None:
        self.dtype, self.magnitude = dtype, magnitude
        self.generator = torch.Generator().manual_seed(7)

    def __call__(self, *shape: int, low: float | None = None, high: float = 1.0) -> Any:
        """Values of the magnitude and of both signs, or from a range."""
        unit = torch.rand(shape, generator=self.generator, dtype=torch.float64)
        signs = torch.randint(0, 2, shape, generator=self.generator) * 2 - 1
        values = (0.3 + 0.7 * unit) * signs * self.magnitude if low is None else low + (high - low) * unit
        return values.to(self.dtype).double()


class Case(NamedTuple):
    """The arguments of an operation. `bounded`: they have ranges, so one magnitude is enough. `ulps`, and `lost` times the magnitude:
    the largest error. `most`: the largest magnitude. `first`: only the first result is used in inference."""

    draw: Callable[[Draw], tuple[Any, ...]]
    named: Mapping[str, Any] = MappingProxyType({})
    bounded: bool = False
    ulps: float = 1.0
    lost: float = 0.0
    most: float = float("inf")
    first: bool = False


CASES: dict[str, Case] = {}


def put(names: str, draw: Callable[[Draw], tuple[Any, ...]], named: dict[str, Any] | None = None, **bounds: Any) -> None:
    """Register arguments for several entries; "relu" stands for "relu.default"."""
    for name in names.split():
        full = f"aten.{name}" if "." in name else f"aten.{name}.default"
        assert full not in CASES, full
        CASES[full] = Case(draw, dict(named or {}), **bounds)


def x(d: Draw) -> tuple[Any, ...]:
    return (d(4, 6),)


def xy(d: Draw) -> tuple[Any, ...]:
    return d(4, 6), d(4, 6)


AT = torch.tensor([2, 0, 2])
PLACES = torch.tensor([[0, 1, 1, 3, 2, 0], [1, 1, 1, 1, 1, 1], [3, 3, 0, 0, 2, 2]])
MASK = torch.arange(24).reshape(4, 6) % 3 == 0
WHOLE = torch.arange(24, dtype=torch.int32).reshape(4, 6) - 7

# -- functions of elements
put("exp exp2 expm1 sin cos tan sinh cosh tanh asinh atan erf erfc special_erfc reciprocal sigmoid square deg2rad rad2deg silu hardswish "
    "hardsigmoid mish selu celu softshrink leaky_relu softplus gelu glu round elu log_sigmoid_forward", x, first=True)
put("sinc", x, lost=1e-15)      # in PyTorch's float64, the sine of a multiple of π is not exactly 0
put("log log2 log10 sqrt rsqrt", lambda d: (d(4, 6, low=1e-4, high=60000),), bounded=True)
put("acos asin atanh", lambda d: (d(4, 6, low=-1),), bounded=True)
put("log1p", lambda d: (d(4, 6, low=-0.9, high=60000),), bounded=True)
put("acosh", lambda d: (d(4, 6, low=1, high=300),), bounded=True)
put("logit", lambda d: (d(4, 6, low=0.01),), bounded=True)
put("round.decimals", x, {"decimals": 1})
put("threshold", lambda d: (d(4, 6), 0.3, 1 / 3))
put("abs neg ceil floor trunc frac relu relu6 hardtanh hardshrink isnan isinf isfinite isposinf isneginf logical_not signbit nan_to_num "
    "_neg_view sign sgn positive clone contiguous alias detach lift_fresh lift_fresh_copy resolve_conj resolve_neg", x)
put("add.Tensor sub.Tensor mul.Tensor div.Tensor floor_divide remainder.Tensor fmod.Tensor atan2 hypot logaddexp maximum minimum max.other "
    "min.other logical_and logical_or logical_xor eq.Tensor ne.Tensor lt.Tensor le.Tensor gt.Tensor ge.Tensor copysign.Tensor heaviside "
    "clamp.Tensor clamp_min.Tensor clamp_max.Tensor copy rsub.Tensor true_divide.Tensor", xy)
put("mul.Scalar div.Scalar add.Scalar sub.Scalar rsub.Scalar", lambda d: (d(4, 6), 1 / 3 * d.magnitude))
put("remainder.Scalar fmod.Scalar floor_divide.Scalar copysign.Scalar eq.Scalar ne.Scalar lt.Scalar le.Scalar gt.Scalar ge.Scalar "
    "clamp_min clamp_max", lambda d: (d(4, 6), 0.75))
put("clamp", lambda d: (d(4, 6), -0.5, 200.0))
put("div.Tensor_mode", xy, {"rounding_mode": "trunc"})
put("div.Scalar_mode", lambda d: (d(4, 6), 0.75), {"rounding_mode": "floor"})
put("pow.Tensor_Tensor", lambda d: (d(4, 6, low=0.1, high=200), d(4, 6, low=-3, high=3)), bounded=True)
put("pow.Tensor_Scalar", lambda d: (d(4, 6).abs(), 1 / 3))
put("pow.Scalar", lambda d: (1e-3, d(4, 6, low=-3, high=3)), bounded=True)
put("xlogy.Tensor", lambda d: (d(4, 6), d(4, 6, low=0.01, high=200)))
put("xlogy.Scalar_Other", lambda d: (d(4, 6), 1 / 3))
put("lerp.Tensor", lambda d: (d(4, 6), d(4, 6), d(4, 6)))
put("lerp.Scalar", lambda d: (d(4, 6), d(4, 6), 1 / 3))
put("addcmul addcdiv", lambda d: (d(4, 6), d(4, 6), d(4, 6)), {"value": 1e-3})
put("where.self", lambda d: (MASK, d(4, 6), d(4, 6)))
put("where.ScalarOther", lambda d: (MASK, d(4, 6), 1 / 3))
put("where.ScalarSelf", lambda d: (MASK, 1 / 3, d(4, 6)))
put("masked_fill.Scalar", lambda d: (d(4, 6), MASK, 0.5))
put("masked_fill.Tensor", lambda d: (d(4, 6), MASK, d()))
put("fill.Scalar", lambda d: (d(4, 6), 0.5))
put("fill.Tensor", lambda d: (d(4, 6), d()))
put("_prelu_kernel", lambda d: (d(2, 3, 4), d(1, 3, 1)))
put("native_dropout", lambda d: (d(4, 6), 0.5, False), first=True)

# -- views and moves
put("permute permute_copy", lambda d: (d(4, 6), [1, 0]))
put("view reshape _unsafe_view view_copy", lambda d: (d(4, 6), [8, 3]))
put("_reshape_alias", lambda d: (d(4, 6), [8, 3], [3, 1]))
put("t numpy_T tril triu msort argsort aminmax median", x)
put("unsqueeze unsqueeze_copy unbind.int argmax argmin cummax cummin sort", lambda d: (d(4, 6), 1))
put("squeeze", lambda d: (d(1, 5),))
put("squeeze.dim", lambda d: (d(1, 5), 0))
put("squeeze.dims squeeze_copy.dims", lambda d: (d(1, 5, 1), [0, 2]))
put("flip", lambda d: (d(4, 6), [1]))
put("diagonal", lambda d: (d(4, 6), 1))
put("narrow", lambda d: (d(4, 6), 1, 2, 3))
put("pixel_shuffle", lambda d: (d(1, 4, 2, 3), 2))
put("pixel_unshuffle", lambda d: (d(1, 1, 4, 6), 2))
put("roll", lambda d: (d(4, 6), [2], [1]))
put("repeat", lambda d: (d(4, 6), [2, 1]))
put("repeat_interleave.self_int", lambda d: (d(4, 6), 2, 1))
put("transpose.int", lambda d: (d(4, 6), 0, 1))
put("expand expand_copy", lambda d: (d(4, 6), [3, 4, 6]))
put("slice.Tensor slice_copy.Tensor", lambda d: (d(4, 6), 1, 1, 6, 2))
put("select.int select_copy.int", lambda d: (d(4, 6), 1, 2))
put("split.Tensor unsafe_split.Tensor", lambda d: (d(4, 6), 2, 1))
put("split_with_sizes split_with_sizes_copy unsafe_split_with_sizes", lambda d: (d(4, 6), [2, 4], 1))
put("cat stack", lambda d: ([d(4, 6), d(4, 6)], 1))
put("constant_pad_nd", lambda d: (d(4, 6), [1, 2], 0.5))
put("reflection_pad1d replication_pad1d", lambda d: (d(2, 3, 4), [1, 2]))
put("reflection_pad2d replication_pad2d", lambda d: (d(2, 3, 4), [1, 2, 0, 1]))
put("reflection_pad3d replication_pad3d", lambda d: (d(1, 2, 3, 4), [1, 2, 0, 1, 1, 0]))
put("unfold", lambda d: (d(4, 6), 1, 3, 2))
put("as_strided as_strided_copy", lambda d: (d(4, 6), [3, 2], [2, 1], 1))
put("im2col", lambda d: (d(1, 2, 4, 5), [2, 2], [1, 1], [0, 1], [1, 1]))

# -- positions
put("embedding", lambda d: (d(4, 6), AT))
put("index.Tensor _unsafe_index.Tensor", lambda d: (d(4, 6), [AT]))
put("index_select", lambda d: (d(4, 6), 1, AT))
put("gather", lambda d: (d(4, 6), 0, PLACES))
put("take", lambda d: (d(4, 6), AT))
put("scatter.src scatter_add", lambda d: (d(4, 6), 0, PLACES, d(4, 6)))
put("scatter.value", lambda d: (d(4, 6), 0, PLACES, 0.5))
put("scatter.reduce", lambda d: (d(4, 6), 0, PLACES, d(4, 6)), {"reduce": "multiply"})
put("scatter.value_reduce", lambda d: (d(4, 6), 0, PLACES, 0.5), {"reduce": "add"})
put("scatter_reduce.two", lambda d: (d(4, 6), 0, PLACES, d(4, 6), "mean"))
put("index_add", lambda d: (d(4, 6), 0, AT, d(3, 6)), {"alpha": 1e-3})
put("index_copy", lambda d: (d(4, 6), 0, AT[:2], d(2, 6)))
put("index_fill.int_Scalar", lambda d: (d(4, 6), 0, AT, 0.5))
put("index_put _unsafe_index_put", lambda d: (d(4, 6), [AT], d(3, 6), True))
put("slice_scatter", lambda d: (d(4, 6), d(4, 2), 1, 1, 3))
put("select_scatter", lambda d: (d(4, 6), d(4), 1, 2))
put("diagonal_scatter", lambda d: (d(4, 6), d(4), 1))
put("as_strided_scatter", lambda d: (d(4, 6), d(3, 2), [3, 2], [7, 2], 1))
put("put", lambda d: (d(4, 6), torch.tensor([7, 0, 23]), d(3)))
put("masked_scatter", lambda d: (d(4, 6), MASK, d(4, 6)))

# -- reductions and order
put("sum mean nansum prod max min any all count_nonzero linalg_vector_norm amax amin var.correction std.correction var_mean.correction "
    "std_mean.correction", x)
put("sum.dim_IntList mean.dim logsumexp any.dims all.dims count_nonzero.dim_IntList var.dim std.dim var_mean.dim", lambda d: (d(4, 6), [1]))
put("prod.dim_int max.dim min.dim median.dim any.dim all.dim cumsum cumprod logcumsumexp", lambda d: (d(4, 6), 1))
put("argsort.stable sort.stable", x, {"stable": True})
put("topk kthvalue", lambda d: (d(4, 6), 2))
put("histc", lambda d: (d(4, 6), 5))
put("nanmedian", x)
put("nanmedian.dim", lambda d: (d(4, 6), 1))
put("_embedding_bag _embedding_bag_forward_only", lambda d: (d(5, 6), torch.tensor([1, 3, 3, 0]), torch.tensor([0, 1])), first=True)
put("index_reduce", lambda d: (d(4, 6), 1, AT, d(4, len(AT)), "amax"))
put("bucketize.Tensor", lambda d: (d(4, 6), d(5).sort().values))
put("bucketize.Scalar", lambda d: (0.5, d(5).sort().values))
put("searchsorted.Tensor", lambda d: (d(5).sort().values, d(4, 6)))
put("searchsorted.Scalar", lambda d: (d(5).sort().values, 0.5))

# -- norms
put("native_layer_norm", lambda d: (d(4, 6), [6], d(6), d(6), 1e-5), first=True)
put("native_group_norm", lambda d: (d(2, 4, 5), d(4), d(4), 2, 4, 5, 2, 1e-5), first=True)
put("_native_batch_norm_legit_no_training", lambda d: (d(2, 4, 5), d(4), d(4), d(4), d(4).abs(), 0.1, 1e-5), first=True)
put("_native_batch_norm_legit.no_stats", lambda d: (d(2, 4, 5), d(4), d(4), True, 0.1, 1e-5), first=True)
put("_weight_norm_interface", lambda d: (d(4, 6), d(4, 1)), first=True)
put("_fused_rms_norm", lambda d: (d(4, 6), [6], d(6), 1e-5), first=True)
put("_softmax", lambda d: (d(4, 6), 1, False))
put("softmax.int _safe_softmax", lambda d: (d(4, 6), 1))
put("_log_softmax", lambda d: (d(4, 6), 1, False), lost=2.0 ** -23)      # the logarithm of a number near 1
put("log_softmax.int", lambda d: (d(4, 6), 1), lost=2.0 ** -23)

# -- products, windows, images
put("mm matmul", lambda d: (d(4, 7), d(7, 5)))
put("bmm", lambda d: (d(2, 4, 7), d(2, 7, 5)))
put("dot", lambda d: (d(7), d(7)))
put("outer", lambda d: (d(5), d(3)))
put("mv", lambda d: (d(4, 7), d(7)))
put("linear", lambda d: (d(4, 7), d(5, 7), d(5)))
put("addmm", lambda d: (d(4, 5), d(4, 7), d(7, 5)), {"alpha": 1e-3, "beta": 0.7})
put("baddbmm", lambda d: (d(2, 4, 5), d(2, 4, 7), d(2, 7, 5)), {"alpha": 1e-3, "beta": 0.7})
put("addmv", lambda d: (d(4), d(4, 7), d(7)), {"alpha": 1e-3, "beta": 0.7})
put("addr", lambda d: (d(4, 3), d(4), d(3)), {"alpha": 1e-3, "beta": 0.7})
put("einsum", lambda d: ("ij,jk,k->i", [d(3, 4), d(4, 5), d(5)]), most=1e6)      # float32 can represent the product of three operands
put("convolution", lambda d: (d(2, 4, 5, 7), d(6, 2, 3, 3), d(6), [2, 1], [1, 1], [1, 1], False, [0, 0], 2))
put("avg_pool1d", lambda d: (d(2, 3, 7), [3], [2], [1]))
put("avg_pool2d", lambda d: (d(1, 2, 7, 6), [3, 2], [2, 2], [1, 0]))
put("avg_pool3d", lambda d: (d(1, 2, 4, 4, 3), [2, 2, 2]))
put("max_pool1d max_pool1d_with_indices", lambda d: (d(2, 3, 7), [3], [2], [1]), first=True)
put("max_pool2d max_pool2d_with_indices", lambda d: (d(1, 2, 7, 6), [3, 2], [2, 2], [1, 0]), first=True)
put("max_pool3d max_pool3d_with_indices", lambda d: (d(1, 2, 4, 4, 3), [2, 2, 2]), first=True)
put("adaptive_avg_pool1d", lambda d: (d(2, 3, 7), [3]))
put("adaptive_avg_pool2d _adaptive_avg_pool2d", lambda d: (d(1, 2, 7, 6), [3, 2]))
put("_adaptive_avg_pool3d", lambda d: (d(1, 2, 4, 4, 3), [2, 3, 2]))
SIZES: dict[int, tuple[int, ...]] = {1: (9,), 2: (9, 4), 3: (5, 4, 3)}
for _n, _size in SIZES.items():
    _image = (1, 2, *(6, 5, 4)[:_n])
    for _mode in ("upsample_nearest", "_upsample_nearest_exact"):
        put(f"{_mode}{_n}d", lambda d, i=_image, s=_size: (d(*i), list(s)))
        put(f"{_mode}{_n}d.vec", lambda d, i=_image, s=_size: (d(*i), list(s), None))
for _mode, _n in (("upsample_linear1d", 1), ("upsample_bilinear2d", 2), ("upsample_trilinear3d", 3), ("upsample_bicubic2d", 2)):
    put(_mode, lambda d, n=_n: (d(1, 2, *(6, 5, 4)[:n]), list(SIZES[n]), True), lost=2.0 ** -22)     # cancellation of neighbours
    put(f"{_mode}.vec", lambda d, n=_n: (d(1, 2, *(6, 5, 4)[:n]), list(SIZES[n]), False, None), lost=2.0 ** -22)
CASES["svod.interpolate.default"] = Case(lambda d: (d(1, 2, 6, 5), [9, 4], None, "bilinear", False))

# -- attention: the probabilities, and what stands between layers, are rounded
put("scaled_dot_product_attention", lambda d: (d(1, 2, 5, 8), d(1, 2, 5, 8), d(1, 2, 5, 4, low=0.2)), ulps=2)
put("_scaled_dot_product_flash_attention_for_cpu", lambda d: (d(1, 2, 5, 8), d(1, 2, 5, 8), d(1, 2, 5, 8, low=0.2)), ulps=2, first=True)


def _heads(d: Draw) -> tuple[Any, ...]:
    t = d(4, 13, 32, low=-1)
    return t, t, t, 32, 4, d(96, 32, low=-1), d(96, low=-1), d(32, 32, low=-1), d(32, low=-1), None, False


def _layer(d: Draw) -> tuple[Any, ...]:
    weights = [d(96, 32, low=-1), d(96, low=-1), d(32, 32, low=-1), d(32, low=-1)]
    norms = [d(32, low=0.5), d(32, low=-1), d(32, low=0.5), d(32, low=-1)]
    feed = [d(64, 32, low=-1), d(64, low=-1), d(32, 64, low=-1), d(32, low=-1)]
    return d(4, 13, 32, low=-1), 32, 4, *weights, True, False, 1e-5, *norms, *feed


def _recurrent(gates: int, states: int = 1) -> Callable[[Draw], tuple[Any, ...]]:
    def draw(d: Draw) -> tuple[Any, ...]:
        weights = [d(*shape, low=-0.5, high=0.5) for shape in ((8 * gates, 6), (8 * gates, 8), (8 * gates,), (8 * gates,))]
        first = [d(1, 3, 8, low=-1) for _ in range(states)]
        return d(5, 3, 6, low=-1), first if states > 1 else first[0], weights, True, 1, 0.0, False, False, False
    return draw


LAYERS = {"aten._native_multi_head_attention.default": _heads, "aten._transformer_encoder_layer_fwd.default": _layer,
          "svod.lstm.default": _recurrent(4, 2), "svod.gru.default": _recurrent(3), "svod.rnn_tanh.default": _recurrent(1),
          "svod.rnn_relu.default": _recurrent(1)}
NO_CASE = {
    "made of nothing, in the dtype that is asked for":
        "full full_like new_full zeros empty.memory_format ones zeros_like empty_like new_zeros new_empty ones_like new_ones "
        "empty_permuted arange arange.start arange.start_step linspace scalar_tensor eye eye.m",
    "converts": "_to_copy to.dtype view.dtype",
    "of complex numbers": "_conj",
    "of integers": "_int_mm "
                   "bitwise_and.Tensor bitwise_or.Tensor bitwise_xor.Tensor bitwise_and.Scalar bitwise_or.Scalar bitwise_xor.Scalar "
                   "bitwise_left_shift.Tensor bitwise_right_shift.Tensor bitwise_left_shift.Tensor_Scalar bitwise_not "
                   "bitwise_right_shift.Tensor_Scalar __lshift__.Tensor __lshift__.Scalar __rshift__.Tensor __rshift__.Scalar",
    "no float beside a number": "where.Scalar",
}


def overload(name: str) -> Any:
    """The PyTorch operation of an entry."""
    space, packet, variant = name.split(".")
    return getattr(getattr(getattr(torch.ops, space), packet), variant)


def called(name: str, args: tuple[Any, ...], named: Mapping[str, Any], expected: Any, first: bool) -> list[Tensor]:
    """svod's results of an operation, in a graph of one node. `expected`: tensors with PyTorch's dtypes and shapes."""
    graph = torch.fx.Graph()
    leaves, form = torch.utils._pytree.tree_flatten(args)
    inputs = {id(a): a for a in leaves if isinstance(a, torch.Tensor)}
    nodes = {key: graph.placeholder(f"x{i}") for i, key in enumerate(inputs)}
    for key, node in nodes.items():
        node.meta["val"] = inputs[key]
    given = torch.utils._pytree.tree_unflatten([nodes.get(id(a), a) for a in leaves], form)
    made = graph.call_function(overload(name), tuple(given), dict(named))
    made.meta["val"] = expected
    results = [made]
    if not isinstance(expected, torch.Tensor):
        results = [graph.call_function(operator.getitem, (made, i)) for i in range(1 if first else len(expected))]
        for node, value in zip(results, expected, strict=False):
            node.meta["val"] = value
    graph.output(tuple(results))
    found = translate(graph, [svod_tensor(a) for a in inputs.values()], {}, FallbackSeconds())
    assert not found.missing, found.missing
    return found.outputs


def svod_tensor(a: Any) -> Tensor:
    return Tensor(a.float().numpy(), dtype="bfloat16") if a.dtype == torch.bfloat16 else Tensor(a.numpy())


def computed(t: Tensor) -> Any:
    return torch.from_numpy(evaluate_graph(t.uop).copy())


def halved(args: Any, dtype: Any) -> Any:
    """Convert float64 tensors among the arguments to `dtype`; a tensor that occurs twice stays one tensor."""
    made: dict[int, Any] = {}

    def half(a: Any) -> Any:
        return made.setdefault(id(a), a.to(dtype)) if isinstance(a, torch.Tensor) and a.dtype == torch.float64 else a
    return torch.utils._pytree.tree_map(half, args)


def check_rounded(got: Any, exact: Any, dtype: Any, ulps: float, lost: float = 0.0) -> None:
    """Check that `got` is `exact` rounded to `dtype`, up to `ulps` units in the last place and `lost`. Values that underflow in float32
    may be 0 in bfloat16, which has the same range."""
    wanted = exact.to(dtype).double()
    bits, least = (10, -24) if dtype == torch.float16 else (7, -126)
    unit = 2.0 ** (wanted.abs().log2().floor() - bits).clamp(min=least)
    right = torch.where(wanted.isfinite(), (got - wanted).abs() <= ulps * unit + lost, (got == wanted) | (got.isnan() & wanted.isnan()))
    assert right.all(), (got[~right][:5], wanted[~right][:5], exact[~right][:5])


def test_every_entry_of_the_table_has_a_case() -> None:
    without = {f"aten.{n}" if "." in n else f"aten.{n}.default" for names in NO_CASE.values() for n in names.split()}
    assert TABLE.keys() == CASES.keys() | LAYERS.keys() | without
    assert not CASES.keys() & without


@pytest.mark.parametrize(("name", "dtype"), a_quarter(product(CASES, HALVES)))
def test_an_entry_is_rounded_once(name: str, dtype: Any) -> None:
    case = CASES[name]
    for magnitude in HALVES[dtype][:1] if case.bounded else HALVES[dtype]:
        if magnitude > case.most:
            continue
        args = case.draw(Draw(dtype, magnitude))
        exact = overload(name)(*args, **case.named)
        results = called(name, halved(args, dtype), case.named, halved(exact, dtype), case.first)
        for result, wide in zip(results, [exact] if isinstance(exact, torch.Tensor) else exact, strict=False):
            if wide.dtype == torch.float64:
                assert result.dtype == DTYPES[dtype]
                check_rounded(computed(result).double(), wide, dtype, case.ulps, case.lost * magnitude)
            else:
                torch.testing.assert_close(computed(result), wide, check_stride=False)


@pytest.mark.parametrize("dtype", HALVES, ids=["float16", "bfloat16"])
@pytest.mark.parametrize("name", LAYERS)
def test_layers_are_as_near_as_pytorch(name: str, dtype: Any) -> None:
    args = LAYERS[name](Draw(dtype, 1.0))
    exact, half = (overload(name)(*a) for a in (args, halved(args, dtype)))
    (result,) = called(name, halved(args, dtype), {}, half, True)[:1]
    exact, half = (t if isinstance(t, torch.Tensor) else t[0] for t in (exact, half))
    assert (computed(result).double() - exact).norm() <= (half.double() - exact).norm()


# -- through both doors ------------------------------------------------------------------------------------------------------
def h(values: Any) -> Any:
    return torch.tensor(values, dtype=torch.float16)


def b(values: Any) -> Any:
    return torch.tensor(values, dtype=torch.bfloat16)


MASKED = 0.26894, 0.73106, 0.0
PROGRAMS: dict[str, tuple[Callable[..., Any], tuple[Any, ...], Any]] = {
    "a mask of 1 - m times a large number": (lambda s, m: (s + (1.0 - m) * -1e9).softmax(-1), (h([1.0, 2, 3]), h([1.0, 1, 0])), MASKED),
    "of float32's least number": (lambda s, m: (s + (1.0 - m) * torch.finfo(torch.float32).min).softmax(-1),
                                  (h([1.0, 2, 3]), h([1.0, 1, 0])), MASKED),
    "a small number": (lambda v: v * 1e-9 * 3, (h([60000.0]),), [1.8e-4]),
    "a tensor without axes": (lambda v, s: v * s, (h([1e-3]), torch.tensor(1e6)), [1000.5]),
    "a number to compare with": (lambda v: (v == 0.1).half(), (h([0.1]),), [1.0]),
    "linear": (F.linear, (h([[256.0, 256]]), h([[129.0, 129]]), h([-2000.0])), [[64064]]),
    "linear of bfloat16": (F.linear, (b([[100.0, 3.1]]), b([[10.0, 1]]), b([-1000.0])), [[3.0938]]),
    "convolution": (F.conv1d, (h([[[100.0], [0.31]]]), h([[[10.0], [1]]]), h([-1000.0])), [[[0.31]]]),
    "transposed convolution": (F.conv_transpose1d, (h([[[100.0], [0.31]]]), h([[[10.0]], [[1]]]), h([-1000.0])), [[[0.31]]]),
    "addmm": (lambda c, x, y: torch.addmm(c, x, y, alpha=0.001), (h([[1.0]]), h([[300.0, 300]]), h([[300.0], [300]])), [[181]]),
    "baddbmm": (lambda c, x, y: torch.baddbmm(c, x, y, alpha=0.001, beta=3), (h([[[1.0]]]), h([[[300.0, 300]]]), h([[[300.0], [300]]])),
                [[[183]]]),
    "norm": (lambda v: v.norm(), (h([300.0] * 50),), 2122),
    "attention with large scores": (F.scaled_dot_product_attention, (h([[300.0, 300]]), h([[300.0, 300], [1, 1]]), h([[2.0], [7]])), [[2]]),
}


DOORS: dict[str, Callable[..., Any]] = {
    "torch.compile": lambda module, *args: torch.compile(module, backend="svod"),
    "svod.torch.compile": lambda module, *args: svod.torch.compile(module, *args, options={"strict": True}),
}


@pytest.mark.parametrize(("name", "door"), [*zip(PROGRAMS, cycle(DOORS), strict=False)])
def test_programs_overflow_only_in_their_results(name: str, door: str) -> None:
    torch._dynamo.reset()
    function, args, expected = PROGRAMS[name]
    got = DOORS[door](Module(function), *args)(*args)
    wanted = torch.tensor(expected, dtype=torch.float64).to(got.dtype).double()
    check_rounded(got.double(), wanted, got.dtype, 1)


def _layers() -> dict[str, tuple[Any, Any]]:
    torch.manual_seed(0)
    nn = torch.nn
    first, second = nn.Conv2d(16, 24, 3, padding=1), nn.Conv2d(24, 16, 3, bias=False)
    normed = nn.Sequential(first, nn.BatchNorm2d(24), nn.ReLU(), second, nn.BatchNorm2d(16))
    return {"linear": (nn.Linear(128, 96), torch.randn(32, 128)), "convolution": (first, torch.randn(2, 16, 9, 7)),
            "transposed": (nn.ConvTranspose2d(16, 8, 3, 2), torch.randn(2, 16, 5, 7)), "batch norm": (normed, torch.randn(2, 16, 9, 7)),
            "feed forward": (nn.Sequential(nn.LayerNorm(64), nn.Linear(64, 256), nn.GELU(), nn.Linear(256, 64)), torch.randn(24, 64))}


@pytest.mark.parametrize(("dtype", "door"), [*zip(HALVES, DOORS, strict=True)], ids=["float16", "bfloat16"])
@pytest.mark.parametrize("name", _layers())
def test_errors_of_random_data_are_no_larger_than_pytorch_s(name: str, dtype: Any, door: str) -> None:
    torch._dynamo.reset()
    module, data = _layers()[name]
    module, data = module.eval().to(dtype), data.to(dtype)
    eager, got = module(data).double(), DOORS[door](module, data)(data).double()
    exact = module.double()(data.double())
    assert (got - exact).norm() <= 1.02 * (eager - exact).norm()
