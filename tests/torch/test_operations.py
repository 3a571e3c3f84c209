"""Each group of the table against PyTorch: the same results, dtypes and shapes."""
from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

torch = pytest.importorskip("torch", reason="the package torch is not installed")
import torch.nn.functional as F  # noqa: E402

import svod.torch  # noqa: E402
import svod.torch.whole  # noqa: E402
from svod.torch.operations import TABLE  # noqa: E402
from tests.draws import a_quarter  # noqa: E402

HALVES = (torch.float16, torch.bfloat16)
X = torch.linspace(-2.0, 2.0, 24).reshape(2, 3, 4)
Y = torch.linspace(0.5, 3.0, 24).reshape(2, 3, 4).flip(0)
N = torch.arange(24).reshape(2, 3, 4) - 7
NEAREST = ("nearest", "nearest-exact")
IMAGE = torch.sin(torch.arange(2 * 4 * 9 * 7.0)).reshape(2, 4, 9, 7)
CASES: dict[str, tuple[Callable[..., Any], tuple[Any, ...]]] = {
    "zero-dimensional operands do not widen": (lambda x, s, i: (x * s, i * s, i + 1, i / 3, x > s),
                                                (X, torch.tensor(2.5, dtype=torch.float64), N)),
    "bools": (lambda a, b: (a & b, a | ~b, a ^ b, a + b, a * 3), (X > 0, Y > 1)),
    "rounding": (lambda x, i: (x.round(), x.floor(), x.trunc(), i // 4, i % 5, torch.remainder(x, 0.7), torch.fmod(x, -0.7)),
                 (X, N)),
    "numbers that an integer type does not hold": (
        lambda u, i: (u < -2, u >= -1, u + -2, u & -1, torch.copysign(u, -1), u / i, torch.xlogy(u, i), u < 300),
        (torch.tensor([1, 2, 250], dtype=torch.uint8), torch.tensor(1495215030, dtype=torch.int32))),
    "factors beside integers": (lambda a: (torch.addmm(a, a, a, beta=0.5, alpha=1.5), torch.addmv(a[0], a, a[1], alpha=2.5),
                                           torch.addcmul(a, a, a, value=0.5)),
                                (torch.tensor([[1, 2], [3, -4]]),)),
    "steps": (lambda x, v: (torch.heaviside(x, v), torch.arange(5, device=x.device), torch.arange(0.5, 4, 1.2)),
              (torch.tensor([1.0, -2.0, float("nan"), 0.0]), torch.tensor(0.5))),
    "powers": (lambda x, y, i: (y ** x, y ** 2, 2 ** x, i ** 2, y.sqrt(), y.rsqrt(), y.log1p()), (X, Y, N)),
    "activations": (lambda x: (F.gelu(x), F.gelu(x, approximate="tanh"), F.silu(x), F.elu(x), F.softplus(x), F.mish(x), F.hardswish(x),
                               F.leaky_relu(x, 0.1), F.hardtanh(x), F.relu6(x), F.logsigmoid(x), F.glu(x), F.selu(x), F.celu(x)), (X,)),
    "half": (lambda x, y: (x + y, x.softmax(-1), x @ y.transpose(1, 2), x.mean(1), x.exp()), (X.half(), Y.half())),
    "bfloat16": (lambda x, y: (x + y, x.softmax(-1), x @ y.transpose(1, 2), x.sum(1)), (X.bfloat16(), Y.bfloat16())),
    "double": (lambda x, y: (x.sin(), x.var(1), x.std((0, 2)), torch.atan2(x, y), torch.special.erfc(x)), (X.double(), Y.double())),
    "reductions": (lambda x, i: (x.sum(), x.mean((0, 2)), x.amax(1), i.sum(0), i.prod(2), (x > 0).any(1), (x > -3).all(), x.norm(dim=1),
                                 x.logsumexp(2), torch.var_mean(x, 1), i.sum(dtype=torch.int32)), (X, N)),
    "positions": (lambda x: (x.argmax(1), x.min(2), x.max(), x.sort(1, descending=True), x.topk(2), x.cumsum(1), x.cummax(0)), (X,)),
    "positions in sorted rows": (lambda x, edges, rows: (
        torch.bucketize(x, edges), torch.bucketize(x, edges, right=True, out_int32=True), torch.bucketize(0.5, edges),
        torch.searchsorted(edges, 0.25), torch.searchsorted(edges, x, side="right"), torch.searchsorted(edges, x[0, 0] * torch.nan),
        torch.searchsorted(rows, x.reshape(6, 4)),
        torch.searchsorted(rows.flip(1), x.reshape(6, 4), sorter=torch.tensor([[2, 1, 0]] * 6)),
        torch.bucketize(x.half(), edges.half())),
        (X, torch.tensor([-1.5, 0.25, 0.25, 0.5, 1.75]), torch.linspace(-2, 1.5, 18).reshape(6, 3))),
    "medians": (lambda x, i: (x.median(), x.median(1), x.median(2, keepdim=True), i.median(0), x[0, :2].median(), x.half().median(1)),
                (torch.where(Y > 2.9, torch.nan, Y), N)),
    "medians without NaN": (lambda x: (x.nanmedian(), x.nanmedian(1), x.nanmedian(2, keepdim=True), x[0].half().nanmedian(0)),
                            (torch.where(torch.arange(24).reshape(2, 3, 4) % 5 == 1, torch.nan, Y),)),
    "bags": (lambda w, i, offsets, weights: (
        F.embedding_bag(i, w, offsets), F.embedding_bag(i, w, offsets, mode="sum", per_sample_weights=weights),
        F.embedding_bag(i, w, offsets, mode="max"), F.embedding_bag(i, w, offsets, mode="mean", padding_idx=2),
        F.embedding_bag(i, w, offsets, mode="sum", include_last_offset=True), F.embedding_bag(i, w.half(), offsets, mode="mean"),
        F.embedding_bag(i.reshape(4, 2), w, mode="max", padding_idx=2)),
        (torch.sin(torch.arange(50.0)).reshape(10, 5), torch.tensor([1, 2, 4, 5, 2, 3, 2, 9]), torch.tensor([0, 3, 3, 6]),
         torch.linspace(-1, 2, 8))),
    "slices reduced": (lambda x, i, v: [x.index_reduce(1, i, v, reduce, include_self=include)
                                        for reduce in ("amax", "amin", "prod", "mean") for include in (True, False)],
                       (X, torch.tensor([1, 0, 1, 1]), torch.cos(torch.arange(32.0)).reshape(2, 4, 4))),
    "histograms": (lambda x: (torch.histc(x, 5, -1, 2), torch.histc(x, 16, -2, 2), torch.histc(x, 7), torch.histc(x[0, 0, :1], 3),
                              torch.histc(x.double(), 16, -2, 2)), (torch.round(X * 8) / 8,)),
    "signs and shifts": (lambda x, i: (x.sign(), x.sgn(), i.sign(), i << 2, i >> 1),
                         (torch.tensor([1.0, -2.0, float("nan"), float("-inf"), 0.0]), torch.tensor([5, -7, 0], dtype=torch.int32))),
    "views": (lambda x: (x.view(6, 4), x.permute(2, 0, 1), x[:, 1:, ::2], x[..., -1], x.unflatten(2, (2, 2)), x.unbind(1), x.roll(1, 2),
                         x.flip(0, 2), x.repeat(1, 2, 1), x.tril(), x.unfold(2, 2, 1), x.split(2, 1), x.expand(3, 2, 3, 4)), (X,)),
    "as_strided": (lambda x: (x.as_strided((2, 3), (1, 2), 3), x.as_strided((4, 2), (2, 1))), (X,)),
    "padding": (lambda x: (F.pad(x, (1, 2, -1, 0), value=3.0), F.pad(x, (1, 1), mode="reflect"), F.pad(x, (2, 1), mode="replicate")), (X,)),
    "joining": (lambda x, y: (torch.cat([x, torch.zeros(0), y], 1), torch.stack([x, y], 2), torch.einsum("abc,adc->abd", x, y)), (X, Y)),
    "gathers": (lambda x, i: (x[:, i], x[i % 2, :, i], x.gather(2, i[None, None].expand(2, 3, 3)), x.index_select(2, i),
                              F.embedding(i, x[0])), (X, torch.tensor([0, 2, 1]))),
    "scatters": (lambda x, i, v: (x.index_put((i,), v), x.index_put((i,), v, accumulate=True), x.masked_fill(x > 0, 0.25),
                                  x.scatter(0, i[:, None, None].expand(2, 3, 4), v), x.index_add(0, i, v),
                                  x.scatter_reduce(0, i[:, None, None].expand(2, 3, 4), v, "amax")), (X, torch.tensor([1, 1]), Y)),
    "slices written": (lambda x, v: (torch.slice_scatter(x, v[:, :2], 1, 1, 3), torch.select_scatter(x, v[:, 0], 1, 2),
                                                 torch.where(x > 0, x, 0.5)), (X, Y)),
    "diagonals written": (lambda x, m: [torch.diagonal_scatter(t, t.diagonal(k, a, b) + 7, k, a, b) for t, k, a, b in (
        (m, 0, 0, 1), (m, 2, 0, 1), (m, -1, 1, 0), (m, 4, 0, 1), (m, 5, 0, 1), (x, 1, 1, 2), (x, -1, 2, 0), (x, 0, -1, 0),
        (m[:1, :1], 0, 0, 1))], (X, torch.arange(20.0).reshape(4, 5))),
    "strided elements written": (lambda x, v: [
        torch.as_strided_scatter(x, v.flatten()[:6].reshape(2, 3), (2, 3), (7, 2), 5),
        torch.as_strided_scatter(x, v[:1, :1, :1], (1, 1, 1), (1, 1, 1)), torch.as_strided_scatter(x, v.flatten()[7], (), (), 23)], (X, Y)),
    "positions in all elements written": (lambda x, i, v: (x.put(i, v), x.put(i % 3, v, accumulate=True), x.put(i[0, :0], v[:0, 0])),
                                          (X, torch.tensor([[5, -1], [0, 23]]), Y[0, :2, :2])),
    "products of bytes": (lambda a: torch._int_mm(a, a.T.contiguous()),
                          (torch.arange(-128, 128, dtype=torch.int8).repeat(33, 1)[:, 5:61],)),
    "convolutions": (lambda x, w, v: (F.conv2d(x, w, padding=1, stride=2), F.conv2d(x, v, groups=4, dilation=2),
                                      F.conv_transpose2d(x, w.transpose(0, 1), stride=2, output_padding=1),
                                      F.conv1d(x[:, :, 0], w[:, :, 0])),
                     (IMAGE, torch.cos(torch.arange(6 * 4 * 9.0)).reshape(6, 4, 3, 3), torch.cos(torch.arange(36.0)).reshape(4, 1, 3, 3))),
    "pooling": (lambda x: (F.max_pool2d(x, 3, 2, 1), F.max_pool2d(x, (3, 2), return_indices=True), F.avg_pool2d(x, 2, ceil_mode=True),
                           F.adaptive_avg_pool2d(x, (3, 2)), F.avg_pool1d(x[:, :, 0], 3)), (IMAGE,)),
    "positions of the largest": (lambda *images: [
        (F.max_pool1d(x[0], 3, 2, 1, return_indices=True), F.max_pool2d(x, 3, 2, 1, return_indices=True),
         F.max_pool2d(x, (2, 3), (3, 2), (1, 0), (1, 2), ceil_mode=True, return_indices=True), F.max_pool2d(x, 2, return_indices=True),
         F.max_pool3d(x[None], 3, 2, 1, return_indices=True)) for x in images],
        (torch.zeros(1, 2, 5, 7, dtype=torch.uint8), torch.full((2, 3, 4, 5), -torch.inf),
         torch.full((1, 2, 4, 5), -2**31, dtype=torch.int32),
         torch.where(IMAGE > 0.5, torch.nan, torch.where(IMAGE < 0, -torch.inf, IMAGE)).double(), IMAGE.round())),
    "resizing": (lambda x: (F.interpolate(x, scale_factor=2), F.interpolate(x, (5, 11), mode="bilinear"),
                            F.interpolate(x, (12, 8), mode="bicubic", align_corners=True)), (IMAGE,)),
    "resizing to the nearest": (
        lambda x, y, z: ([F.interpolate(y, scale_factor=f, mode=mode) for mode in NEAREST for f in (1.3, 2.0, 2.4)],
                         [F.interpolate(x, scale_factor=f, mode=mode, recompute_scale_factor=again) for mode in NEAREST
                          for f in ((1.05, 1.3), (2.1, 0.7), (20.1, 1.05)) for again in (False, True)],
                         [F.interpolate(z, scale_factor=f, mode=mode) for mode in NEAREST for f in ((1.3, 2.0, 1.05), (1.99, 1.3, 0.9))],
                         [F.interpolate(y.double(), size, mode=mode) for mode in NEAREST for size in (3, 10, 77)]),
        (IMAGE, IMAGE[0], IMAGE[None])),
    "norms": (lambda x, w: (F.layer_norm(x, (4,), w, w), F.group_norm(x.transpose(1, 2), 2, w, w), F.instance_norm(x),
                            F.rms_norm(x, (4,), w, 1e-5), F.batch_norm(x.transpose(1, 2), w, w.abs() + 1, w, w)),
              (X, torch.tensor([0.5, 1.0, 2.0, -1.0]))),
    "softmax": (lambda x: (x.softmax(1), x.log_softmax(0), x.softmax(-1, dtype=torch.float64)), (X,)),
    "attention": (lambda q, k, m: (F.scaled_dot_product_attention(q, k, k), F.scaled_dot_product_attention(q, k, k, is_causal=True),
                                   F.scaled_dot_product_attention(q, k, k, m), F.scaled_dot_product_attention(q, k[:, :1], k[:, :1],
                                                                                                            enable_gqa=True)),
                  (IMAGE, IMAGE.flip(0), torch.ones(9, 9, dtype=torch.bool).tril())),
    "made of nothing": (lambda x: (torch.arange(5), torch.arange(0, 1, 0.25), torch.ones(2, 3) + x[:, :, 0], torch.zeros_like(x),
                                   torch.eye(3), torch.full((2,), 7), torch.linspace(0, 1, 5)), (X,)),
    "no elements": (lambda x: (x[:0], x[:0].sum(1), torch.cat([x[:, :0], x], 1)), (X,)),
}


class Module(torch.nn.Module):
    def __init__(self, function: Callable[..., Any]) -> None:
        super().__init__()
        self.function = function

    def forward(self, *args: Any) -> Any:
        return self.function(*args)


def agree(got: Any, expected: Any) -> None:
    leaves, wanted = torch.utils._pytree.tree_leaves(got), torch.utils._pytree.tree_leaves(expected)
    assert len(leaves) == len(wanted)
    for a, b in zip(leaves, wanted, strict=True):
        narrow = b.dtype in HALVES
        torch.testing.assert_close(a, b, rtol=2e-2 if narrow else 1e-5, atol=2e-2 if narrow else 2e-6, equal_nan=True)


@pytest.mark.parametrize("name", a_quarter(CASES))
def test_operations_agree_with_pytorch(name: str) -> None:
    function, args = CASES[name]
    run = svod.torch.compile(Module(function), *args, options={"strict": True})
    agree(run(*args), function(*args))


def test_every_operation_of_the_table_is_registered_with_pytorch() -> None:
    unknown = []
    for name in TABLE:
        space, packet, overload = name.split(".")       # aten, or svod for svod's own operators
        if overload not in getattr(getattr(getattr(torch.ops, space), packet, None), "overloads", list)():
            unknown.append(name)
    assert not unknown


def test_most_of_core_aten_is_in_the_table() -> None:
    """Missing are only random numbers, transforms, sizes that depend on values, and gradients."""
    packets = [getattr(torch.ops.aten, p) for p in dir(torch.ops.aten) if not p.startswith("__")]
    core = [o for p in packets if hasattr(p, "overloads") for name in p.overloads() if torch.Tag.core in (o := getattr(p, name)).tags]
    missing = [str(o) for o in core if str(o) not in TABLE and "backward" not in str(o) and ".sym_" not in str(o) and ".out" not in str(o)]
    assert len(core) > 150 and len(missing) <= 15, missing
