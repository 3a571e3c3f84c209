"""No operation does asymptotically more work than a direct loop, by the estimates of its kernels.

Each operation is scheduled at two sizes and not run. `flops` and `bytes_moved` of all its kernels must not grow faster than the iterations
of the direct loop, and the bytes of its operands and result, and must stay within a constant factor of them.
"""
from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import reduce

import numpy as np
import pytest

from svod.core.cost.op_count import count_operations
from svod.core.graph import graph
from svod.core.ir.uop import Ops
from svod.core.schedule.schedule import create_schedule
from svod.tensor import Tensor, where
from tests.draws import a_half

N = 24                      # sizes are N and 2·N; windows and groups of fixed size fit into N
GROWTH = 1.1                # allowance for borders of windows and terms of lower order
MOST_COPIES = 4.0           # multiple of the bytes of operands and result: a few intermediates of their size
MOST_OPERATIONS = 24        # per iteration of the direct loop
SERIES = {"erfc": 40, **dict.fromkeys(("logsigmoid", "softplus", "mish", "acosh", "logaddexp", "binary_cross_entropy",
                                       "binary_cross_entropy_with_logits"), 44)}     # the same for functions with a series, such as log1p


def f(*shape: int) -> Tensor:
    return Tensor(np.zeros(shape, np.float32))


def i(*shape: int) -> Tensor:
    return Tensor(np.zeros(shape, np.int32))


@dataclass(frozen=True)
class Work:
    """An operation that `build` makes at a size; `loop`: iterations of the direct loop; `each`: most operations per iteration."""

    build: Callable[[int], Tensor | Sequence[Tensor]]
    loop: Callable[[int], int] = lambda n: n * n
    each: float = MOST_OPERATIONS
    copies: float = MOST_COPIES


def square(name: str, *args: object, **options: object) -> Work:
    """A method of an n×n matrix that reads each element a fixed number of times."""
    return Work(lambda n: getattr(f(n, n), name)(*args, **options), each=SERIES.get(name, MOST_OPERATIONS))


def with_other(name: str) -> Work:
    return Work(lambda n: getattr(f(n, n), name)(f(n, n)), each=SERIES.get(name, MOST_OPERATIONS))


def of_integers(name: str) -> Work:
    return Work(lambda n: getattr(i(n, n), name)(i(n, n)))


def written_in_parts(t: Tensor, n: int) -> Tensor:
    """Write every row of t by a separate assignment."""
    for row in range(n):
        t[row] = f(n)
    return t


UNARY = [
    "neg", "logical_not", "abs", "sign", "floor", "ceil", "trunc", "round", "exp", "exp2", "log", "log2", "sqrt", "reciprocal", "sin",
    "cos", "tanh", "erf", "log10", "tan", "rsqrt", "square", "log1p", "expm1", "isnan", "isinf", "isfinite", "relu", "relu6",
    "leaky_relu", "elu", "sigmoid", "logsigmoid", "silu", "gelu", "softplus", "hardsigmoid", "hardswish", "hardtanh", "mish",
    "softmax", "log_softmax", "flatten", "ravel", "squeeze", "contiguous", "clone", "float", "double", "half", "bfloat16", "int",
    "long", "bool", "frac", "isposinf", "isneginf", "nan_to_num", "signbit", "cosh", "acosh", "erfc", "deg2rad",
    "rad2deg", "selu", "celu", "hardshrink", "softshrink", "tanhshrink", "softsign", "glu", "swiglu", "dropout", "diff", "norm",
    "normalize", "diagonal", "diag", "trace", "sum", "prod", "mean", "var", "std", "var_mean", "std_mean", "max", "min", "amax", "amin",
    "aminmax", "argmax", "argmin", "any", "all", "count_nonzero", "logsumexp", "tril", "triu", "zeros_like", "ones_like",
    "nansum", "nanmean", "logit", "sinc", "t"]
BINARY = [
    "add", "sub", "mul", "div", "floor_divide", "remainder", "eq", "ne", "lt", "le", "gt", "ge", "logical_and", "logical_or",
    "logical_xor", "maximum", "minimum", "reshape_as", "expand_as", "true_divide", "fmod", "logaddexp", "hypot", "copysign", "xlogy",
    "isclose", "clamp_min", "clamp_max", "heaviside", "mse_loss", "l1_loss", "huber_loss", "smooth_l1_loss", "binary_cross_entropy",
    "binary_cross_entropy_with_logits", "kl_div", "cosine_similarity", "pairwise_distance"]
INTEGER = [
    "bitwise_and", "bitwise_or", "bitwise_xor", "bitwise_left_shift", "bitwise_right_shift"]
ALONG = [
    "sum", "prod", "mean", "var", "std", "max", "min", "argmax", "argmin", "any", "all", "count_nonzero", "logsumexp", "softmax",
    "log_softmax", "norm"]
SCANS = ["cumsum", "cumprod", "logcumsumexp", "cummax", "cummin"]


def passes(n: int) -> int:
    """The number of passes of a merge sort over n elements."""
    return (n - 1).bit_length()


WORK: dict[str, Work] = {
    **{name: square(name) for name in UNARY},
    **{name: with_other(name) for name in BINARY},
    **{name: of_integers(name) for name in INTEGER},
    **{f"{name} along an axis": square(name, 0) for name in ALONG},
    "gelu tanh": square("gelu", "tanh"),
    **{name: Work(lambda n, name=name: getattr(f(n, n), name)(), each=48) for name in ("sinh", "asinh", "atanh")},  # type: ignore[misc]
    **{name: Work(lambda n, name=name: getattr(f(n, n), name)(), each=66) for name in ("asin", "acos", "atan")},  # type: ignore[misc]
    "atan2": Work(lambda n: f(n, n).atan2(f(n, n)), each=60),
    # -- library kernels: one combination per element, whatever the axis
    **{f"{name} {along}": Work(lambda n, name=name, dim=dim: getattr(f(n, n, 3), name)(dim), lambda n: 3 * n * n, each=4)  # type: ignore[misc]
       for name in SCANS for along, dim in (("of rows", 1), ("of columns", 0))},
    "argsort": Work(lambda n: f(n, n).argsort(), lambda n: n * n * passes(n), each=1),
    "argsort of columns": Work(lambda n: f(n, n).argsort(0), lambda n: n * n * passes(n), each=1),
    "sort": Work(lambda n: f(n, n).sort().values, lambda n: n * n * passes(n), each=2),
    # a transposed copy, and positions of 8 bytes, are written and read
    "msort": Work(lambda n: f(n, n).msort(), lambda n: n * n * passes(n), each=2, copies=5.0),
    "median": Work(lambda n: f(n, n).median(1), lambda n: n * n * passes(n), each=4, copies=6),
    # a pass for each of few elements reads all of them, and asks which were chosen
    "topk": Work(lambda n: f(n, n).topk(2).values, lambda n: 2 * n * n, each=4),
    "topk of many": Work(lambda n: f(n, n).topk(n // 2).values, lambda n: n * n * passes(n), each=2),
    "kthvalue": Work(lambda n: f(n, n).kthvalue(3).values, lambda n: 3 * n * n, each=9, copies=8),
    "scatter": Work(lambda n: f(n, n).scatter(0, i(n, n), f(n, n)), each=1),
    "scatter a part": Work(lambda n: f(n, n).scatter(0, i(3, n), f(n, n))),
    "scatter_add": Work(lambda n: f(n, n).scatter_add(1, i(n, n), f(n, n)), each=1),
    "scatter_reduce": Work(lambda n: f(n, n).scatter_reduce(1, i(n, n), f(n, n), "mean", include_self=False), each=6, copies=5),
    "index_add": Work(lambda n: f(n, n).index_add(0, i(n), f(n, n)), each=1),
    "index_reduce": Work(lambda n: f(n, n).index_reduce(0, i(n), f(n, n), "mean", include_self=False), each=6, copies=5),
    "index_copy": Work(lambda n: f(n, n).index_copy(1, i(n), f(n, n)), each=1),
    "index_fill": square("index_fill", 0, [1, 2], 7.0),
    "t[[…]] = x": Work(lambda n: f(n, n)._put([(0, i(n))], f(n, n)), copies=4),
    "masked_scatter": Work(lambda n: f(n, n).masked_scatter(f(n, n) > 0, f(n, n)), copies=6),
    "tile": Work(lambda n: f(n, n).tile(2), lambda n: 2 * n * n),
    "vstack": Work(lambda n: Tensor.vstack([f(n, n), f(n)])),
    "hstack": Work(lambda n: Tensor.hstack([f(n, n), f(n, 1)])),
    "nonzero": Work(lambda n: i(n, n).nonzero(size=n * n), copies=5),
    "masked_select": Work(lambda n: f(n, n).masked_select(f(n, n) > 0, size=n * n), copies=6),
    # -- mixtures
    "lerp": Work(lambda n: f(n, n).lerp(f(n, n), f(n, n))),
    "addcmul": Work(lambda n: f(n, n).addcmul(f(n, n), f(n, n), value=2)),
    "addcdiv": Work(lambda n: f(n, n).addcdiv(f(n, n), f(n, n), value=2)),
    "div of integers toward zero": Work(lambda n: i(n, n).div(i(n, n), rounding_mode="trunc")),
    "prelu": Work(lambda n: f(n, n).prelu(f(n))),
    "threshold": square("threshold", 0.1, 5.0),
    "nll_loss": Work(lambda n: f(n, n).nll_loss(i(n), f(n)), lambda n: n),
    "cross_entropy": Work(lambda n: f(n, n).cross_entropy(i(n), f(n), label_smoothing=0.1)),
    "rotary_embedding": Work(lambda n: f(3, n, 8).rotary_embedding(f(n, 4), f(n, 4)), lambda n: 24 * n),
    "rotary_angles": Work(lambda n: Tensor.rotary_angles(n, 8), lambda n: 8 * n),
    "bitwise_not": Work(lambda n: i(n, n).bitwise_not()),
    "floor_divide of integers": Work(lambda n: i(n, n) // i(n, n)),
    "remainder of integers": Work(lambda n: i(n, n) % i(n, n)),
    "add broadcast": Work(lambda n: f(n, 1) + f(1, n)),
    "pow": with_other("pow"),
    "pow by a number": square("pow", 3),
    # one step for each of the 31 bits of the exponent
    "pow of integers": Work(lambda n: i(n, n) ** i(n, n), each=200),
    "where": Work(lambda n: where(f(n, n) > 0, f(n, n), f(n, n))),
    "masked_fill": Work(lambda n: f(n, n).masked_fill(f(n, n) > 0, 1.0)),
    "clamp": square("clamp", -1.0, 1.0),
    "clip": square("clip", -1.0, 1.0),
    "cast": square("cast", "int32"),
    "bitcast": square("bitcast", "int32"),
    "to": square("to", "float64"),
    "type": square("type", "float64"),
    "astype": square("astype", "float64"),
    "full_like": square("full_like", 2.5),
    "full": Work(lambda n: Tensor.full((n, n), 2.5)),
    "zeros": Work(lambda n: Tensor.zeros(n, n)),
    "ones": Work(lambda n: Tensor.ones(n, n)),
    "arange": Work(lambda n: Tensor.arange(n), lambda n: n),
    "linspace": Work(lambda n: Tensor.linspace(0, 1, n), lambda n: n),
    "eye": Work(lambda n: Tensor.eye(n)),
    # -- movement
    "reshape": Work(lambda n: f(n, n).reshape(n * n)),
    "view": Work(lambda n: f(n, n).view(n * n)),
    "unflatten": square("unflatten", 0, (2, -1)),
    "unsqueeze": square("unsqueeze", 1),
    "permute": square("permute", 1, 0),
    "transpose": square("transpose"),
    "swapaxes": square("swapaxes", 0, 1),
    "movedim": square("movedim", 0, 1),
    "T": Work(lambda n: f(n, n).T),
    "mT": Work(lambda n: f(n, n).mT),
    "flip": square("flip", 0),
    "expand": Work(lambda n: f(n, 1).expand(n, n)),
    "broadcast_to": Work(lambda n: f(1, n).broadcast_to((n, n))),
    "repeat": square("repeat", 2, 3),
    "repeat_interleave": square("repeat_interleave", 3, 0),
    "pad": square("pad", (1, 2, 3, 4)),
    "shrink": Work(lambda n: f(n, n).shrink([(1, n - 1), None])),
    "narrow": Work(lambda n: f(n, n).narrow(0, 1, n // 2)),
    "unfold": square("unfold", 0, 5, 2),
    "roll": square("roll", 3, 0),
    **{f"pad {mode}": square("pad", (1, 2, 3, 4), mode) for mode in ("reflect", "symmetric", "replicate", "circular")},
    "diag of a vector": Work(lambda n: f(n).diag()),
    "diag_embed": Work(lambda n: f(3, n).diag_embed(1), lambda n: 3 * n * n),
    "meshgrid": Work(lambda n: Tensor.meshgrid(f(n), f(n))),
    "pixel_shuffle": Work(lambda n: f(8, n, n).pixel_shuffle(2)),
    "pixel_unshuffle": Work(lambda n: f(3, n, n).pixel_unshuffle(2)),
    "cat": Work(lambda n: Tensor.cat([f(n, n), f(n, n), f(5, n)], 0)),
    # each part is stored into its slice: no arithmetic, and each element is moved once
    "cat of many": Work(lambda n: Tensor.cat([f(1, 8) for _ in range(n)], 0), lambda n: 8 * n, each=0, copies=1),
    "cat of many along the last axis": Work(lambda n: Tensor.cat([f(n, 1) for _ in range(n)], 1), each=0, copies=1),
    "cat of many that is read": Work(lambda n: Tensor.cat([f(n, 8) for _ in range(n)], 1) * 2, lambda n: 8 * n * n, each=1, copies=2),
    "cat of cats": Work(lambda n: reduce(lambda x, _: Tensor.cat([x, f(1, 8)]), range(n), f(1, 8)), lambda n: 8 * n, each=0, copies=1),
    "stack of slices": Work(lambda n: Tensor.stack(f(n, n).unbind(0), 1), each=0, copies=1),
    "assign": Work(lambda n: f(n, n).assign(f(n, n)), each=0, copies=1),
    "__setitem__": Work(lambda n: written_in_parts(f(n, n), n), each=0, copies=1),
    "stack": Work(lambda n: Tensor.stack([f(n, n), f(n, n)], 1)),
    "split": Work(lambda n: f(n, n).split(n // 3)),
    "chunk": Work(lambda n: f(n, n).chunk(3)),
    "unbind": Work(lambda n: f(n, 8).unbind(), lambda n: 8 * n),
    # -- indexing
    "__getitem__": Work(lambda n: f(n, n)[1:-1, ::-2]),
    "__getitem__ of integers": Work(lambda n: f(n, n)[i(n), 3:]),
    "__getitem__ of a mask": Work(lambda n: f(n, n)[np.arange(n) % 2 == 0]),
    "__getitem__ of points": Work(lambda n: f(n, n)[i(n), i(n)], lambda n: n),
    "take": Work(lambda n: f(n, n).take(i(n), 0)),
    "take of a few": Work(lambda n: f(n, 8).take(i(5), 0), lambda n: 40),
    "index_select": Work(lambda n: f(n, n).index_select(1, i(n))),
    "gather": Work(lambda n: f(n, n).gather(0, i(n, n))),
    "take_along_dim": Work(lambda n: f(n, n).take_along_dim(i(n, n), 1)),
    "take_along_dim of a row": Work(lambda n: f(n, n).take_along_dim(i(1, n), 1)),
    "one_hot": Work(lambda n: i(n).one_hot(n)),
    "embedding": Work(lambda n: i(n).embedding(f(n, n))),
    # -- contractions
    "matmul": Work(lambda n: f(n, 2 * n).matmul(f(2 * n, n)), lambda n: n * n * 2 * n, each=2),
    "matmul of a batch": Work(lambda n: f(n, 5, n).matmul(f(n, 7)), lambda n: n * 5 * n * 7, each=2),
    "dot": Work(lambda n: f(n).dot(f(n)), lambda n: n, each=2),
    "mm": Work(lambda n: f(n, n).mm(f(n, n)), lambda n: n ** 3, each=2),
    "bmm": Work(lambda n: f(n, 5, 6).bmm(f(n, 6, 7)), lambda n: n * 5 * 6 * 7, each=2),
    "outer": Work(lambda n: f(n).outer(f(n)), each=1),
    "inner": Work(lambda n: f(n, n).inner(f(n, n)), lambda n: n ** 3, each=2),
    "tensordot": Work(lambda n: f(n, 3, n).tensordot(f(3, n, n)), lambda n: 3 * n ** 3, each=2),
    "addmm": Work(lambda n: f(n, n).addmm(f(n, n), f(n, n)), lambda n: n ** 3, each=2.1),
    "einsum": Work(lambda n: Tensor.einsum("bij,bjk->bik", f(3, n, n), f(3, n, n)), lambda n: 3 * n ** 3, each=2),
    "einsum of three": Work(lambda n: Tensor.einsum("ij,jk,kl->il", f(n, n), f(n, n), f(n, n)), lambda n: n ** 3, each=4),
    "einsum of a diagonal": Work(lambda n: Tensor.einsum("ii->i", f(n, n)), lambda n: n),
    "cdist": Work(lambda n: f(n, 8).cdist(f(n, 8)), lambda n: 8 * n * n, each=4),
    "linear": Work(lambda n: f(n, n).linear(f(n, n), f(n)), lambda n: n ** 3, each=2.1),
    "conv1d": Work(lambda n: f(2, n, n).conv1d(f(n, n, 3), padding=1), lambda n: 2 * n * n * n * 3, each=2),
    "conv2d": Work(lambda n: f(2, 3, n, n).conv2d(f(5, 3, 3, 3), padding=1), lambda n: 2 * 5 * n * n * 27, each=2),
    "conv2d of channels": Work(lambda n: f(1, n, 7, 7).conv2d(f(2 * n, n, 3, 3), stride=2), lambda n: 2 * n * 9 * n * 9, each=2),
    "conv2d of groups": Work(lambda n: f(1, n, 9, 9).conv2d(f(n, 1, 3, 3), groups=n), lambda n: n * 49 * 9, each=2),
    "conv3d": Work(lambda n: f(1, 2, n, 6, 6).conv3d(f(3, 2, 1, 3, 3)), lambda n: 3 * n * 16 * 18, each=2),
    # each tap of the weight once for each element of the input
    "conv_transpose1d": Work(lambda n: f(2, n, n).conv_transpose1d(f(n, n, 4), stride=2, padding=1), lambda n: 2 * n ** 3 * 4, each=2.1),
    "conv_transpose2d": Work(lambda n: f(1, 3, n, n).conv_transpose2d(f(3, 5, 4, 4), stride=2, padding=1),
                             lambda n: 15 * n * n * 16, each=2.3),
    "conv_transpose3d": Work(lambda n: f(1, 2, n, 6, 6).conv_transpose3d(f(2, 3, 2, 2, 2), stride=2), lambda n: 6 * n * 36 * 8, each=2.1),
    "scaled_dot_product_attention": Work(lambda n: f(2, n, 8).scaled_dot_product_attention(f(2, n, 8), f(2, n, 8)),
                                         lambda n: 2 * n * n * 16, each=3),
    "scaled_dot_product_attention causal": Work(
        lambda n: f(2, n, 8).scaled_dot_product_attention(f(2, n, 8), f(2, n, 8), is_causal=True), lambda n: 2 * n * n * 16, each=3),
    # -- windows and norms
    "max_pool1d": Work(lambda n: f(2, n, n).max_pool1d(2), lambda n: 2 * n * n, each=2),
    "max_pool3d": Work(lambda n: f(2, n, n, 4).max_pool3d(2), lambda n: 8 * n * n, each=2),
    "avg_pool1d": Work(lambda n: f(2, n, n).avg_pool1d(2), lambda n: 2 * n * n, each=2),
    "avg_pool3d": Work(lambda n: f(2, n, n, 4).avg_pool3d(2), lambda n: 8 * n * n, each=2),
    "adaptive_avg_pool1d": Work(lambda n: f(2, n, n).adaptive_avg_pool1d(4), lambda n: 2 * n * n, each=2),
    "instance_norm": Work(lambda n: f(2, n, n).instance_norm(None, None, f(n), f(n)), lambda n: 2 * n * n),
    "interpolate": Work(lambda n: f(2, 3, n, n).interpolate(scale_factor=2), lambda n: 24 * n * n),
    "interpolate bilinear": Work(lambda n: f(2, 3, n, n).interpolate(scale_factor=1.5, mode="bilinear"), lambda n: 14 * n * n),
    "max_pool2d": Work(lambda n: f(2, 3, n, n).max_pool2d(3, 2, 1), lambda n: 6 * (n // 2) ** 2 * 9, each=2),
    "avg_pool2d": Work(lambda n: f(2, 3, n, n).avg_pool2d(2), lambda n: 6 * (n // 2) ** 2 * 4, each=2),
    "avg_pool2d of borders": Work(lambda n: f(2, 3, n, n).avg_pool2d(3, 2, 1, count_include_pad=False), lambda n: 6 * (n // 2) ** 2 * 9),
    "adaptive_avg_pool2d": Work(lambda n: f(2, 3, n, n).adaptive_avg_pool2d(4), lambda n: 6 * n * n, each=2),
    "adaptive_avg_pool2d of uneven parts": Work(lambda n: f(2, 3, n, n).adaptive_avg_pool2d(5), lambda n: 6 * n * n),
    "adaptive_avg_pool2d to more": Work(lambda n: f(2, 3, n, n).adaptive_avg_pool2d(n + 5), lambda n: 6 * (n + 5) ** 2),
    "layer_norm": Work(lambda n: f(n, n).layer_norm(n, f(n), f(n))),
    "rms_norm": Work(lambda n: f(n, n).rms_norm(n, f(n))),
    "batch_norm": Work(lambda n: f(2, n, n).batch_norm(f(n), f(n), f(n), f(n)), lambda n: 2 * n * n),
    "group_norm": Work(lambda n: f(2, n, n).group_norm(4, f(n), f(n)), lambda n: 2 * n * n),
    # -- random numbers: twenty rounds of threefry for two words
    "rand": Work(lambda n: Tensor.rand(n, n), each=200),
    "uniform": Work(lambda n: Tensor.uniform(n, n), each=200),
    "randn": Work(lambda n: Tensor.randn(n, n), each=400),
    "normal": Work(lambda n: Tensor.normal(n, n), each=400),
    "randint": Work(lambda n: Tensor.randint(0, 10, (n, n)), each=200),
    "rand_like": Work(lambda n: f(n, n).rand_like(), each=200),
    "randn_like": Work(lambda n: f(n, n).randn_like(), each=400),
}
# attributes that schedule nothing: properties of a tensor, its values, its memory
NO_KERNELS = {"shape", "dtype", "ndim", "dim", "size", "numel", "element_size", "nbytes", "device", "uop", "from_uop", "from_numpy",
              "empty", "empty_like", "is_realized", "realize", "realize_batch", "prepare", "prepare_batch", "numpy", "item", "tolist",
              "equal", "allclose", "detach", "manual_seed", "from_dlpack", "from_file", "cpu"}


def test_every_operation_has_a_row() -> None:
    operations = {name for name in dir(Tensor) if not name.startswith("_")} - NO_KERNELS
    assert operations - {name.partition(" ")[0] for name in WORK} == set()


def cost(built: Tensor | Sequence[Tensor]) -> tuple[int, int, int]:
    """(operations, bytes moved, bytes of operands and result) of the kernels scheduled for `built`."""
    tensors = [built] if isinstance(built, Tensor) else list(built)
    sink = graph.sink(*(t.uop for t in tensors))
    work = [count_operations(call.ast) for call in create_schedule(sink).calls]
    least = sum(t.nbytes for t in tensors) + sum(u.arg * u.dtype.itemsize for u in sink.walk(Ops.BUFFER))
    return sum(w.flops for w in work), sum(w.bytes_moved for w in work), least


PARTS = 6       # number of parts of the table, each a separate test


@pytest.mark.parametrize("part", a_half(range(PARTS)))
def test_work_grows_as_that_of_a_direct_loop(part: int) -> None:
    wrong = {name: said for name in list(WORK)[part::PARTS] for said in too_much(WORK[name])}
    assert not wrong


def too_much(work: Work) -> Iterator[str]:
    """The ways in which an operation does more work than allowed."""
    flops, moved, least = cost(work.build(N))
    flops2, moved2, least2 = cost(work.build(2 * N))
    loop, loop2 = work.loop(N), work.loop(2 * N)
    if flops2 * loop > GROWTH * flops * loop2:
        yield f"{flops} operations become {flops2}, iterations {loop} become {loop2}"
    if moved2 * least > GROWTH * moved * least2:
        yield f"{moved} bytes become {moved2}, those of operands and result {least} become {least2}"
    if flops2 > work.each * loop2:
        yield f"{flops2} operations in {loop2} iterations"
    if moved2 > work.copies * least2:
        yield f"{moved2} bytes moved, {least2} of operands and result"
