"""Merging the axes of sums of products: results stay the same for any extents, strides and groups, and other kernels are refused."""
from __future__ import annotations

import random

import pytest

import svod
from svod.core.ir import symbolic as sy
from svod.core.ir.dtype import dtypes
from svod.core.ir.uop import Ops, UOp
from svod.core.kernel.kernel import Kernel
from svod.core.schedule.flatten import flatten
from svod.core.spec.evaluate import evaluate
from svod.errors import KernelOptError
from svod.tensor import Tensor
from tests.agreement import Case
from tests.core.corpus import CORPUS, data, kernel_of
from tests.draws import count
from tests.hand_kernels import Ast


def random_convolution(rng: random.Random) -> Tensor:
    """Make a random convolution with a bias and a residual; the image is stored with its channels last or in its given order."""
    groups, taps, stride, dilation = rng.choice((1, 1, 2)), rng.choice((1, 2, 3)), rng.choice((1, 2)), rng.choice((1, 2))
    n, c, o, h, w = rng.randint(1, 3), groups * rng.randint(1, 4), groups * rng.choice((2, 3, 5)), rng.randint(5, 8), rng.randint(5, 9)
    x = data(n, h, w, c).permute(0, 3, 1, 2) if rng.random() < 0.5 else data(n, c, h, w)
    k = data(o, taps, taps, c // groups).permute(0, 3, 1, 2) if rng.random() < 0.5 else data(o, c // groups, taps, taps)
    y = x.conv2d(k, data(o), padding=rng.choice((0, 1)), stride=stride, dilation=dilation, groups=groups)
    y = y + data(*y.shape)
    return y.permute(0, 2, 3, 1).contiguous() if rng.random() < 0.5 else y


def test_the_same_is_computed() -> None:
    ran = 0
    for seed in range(count(16)):
        kernel = Kernel(kernel_of(random_convolution(random.Random(f"flatten {seed}"))))
        try:
            flat = flatten(kernel.ast, kernel.ast.src[0])
        except KernelOptError as e:
            assert "already" in str(e) or "not one sum" in str(e)       # one tap of one channel
            continue
        case = Case(kernel, seed)
        case.check([*evaluate(flat, case.args), *case.args[1:]], str(flat))
        stored, = flat.src
        reduce, = stored.src[1].walk(Ops.REDUCE)
        assert len(reduce.src) == 2 and len(stored.src) - 2 <= 3, "one axis is summed up, and two, with groups three, are left"
        ran += 1
    assert ran


def test_the_axis_that_memory_has_innermost_comes_last() -> None:
    """The last axis is the channels for an image stored with channels last, otherwise the columns of the window."""
    for image, inside in ((data(2, 6, 6, 5).permute(0, 3, 1, 2), 5), (data(2, 5, 6, 6), 3)):
        weight = data(4, 3, 3, 5).permute(0, 3, 1, 2) if inside == 5 else data(4, 5, 3, 3)
        ast = kernel_of(image.conv2d(weight))
        flat = flatten(ast, ast.src[0])
        factors = [u.src[0] for u in flat.src[0].src[1].walk(Ops.INDEX) if u.src[0].op is Ops.STAGE]
        summed = [r for s in factors for r in s.src[1:] if sy.extent_of(r) == 45]
        assert len(summed) == 2
        divided = {int(u.src[1].arg) for u in flat.walk(Ops.MOD) if u.src[0] in summed}
        assert inside in divided


@pytest.mark.parametrize(("name", "why"), [("gemm", "already"), ("softmax", "not one sum"), ("sum_all", "not sum up products")])
def test_what_is_refused(name: str, why: str) -> None:
    ast = CORPUS[name]()
    with pytest.raises(KernelOptError, match=why):
        flatten(ast, ast.src[0])


def test_a_factor_that_another_output_reads_too() -> None:
    """One output stores the factor itself, the other a product with it: merged axes of the product would not fit the first output."""
    a = Ast()
    y, z, x, w = a.param(0, 60), a.param(1, 72), a.param(2, 72), a.param(3, 30)
    p, q, r, o, s, t = a.axes(12, 2, 3, 5, 2, 3)
    first, second = a.stage(a.load(x, p * 6 + q * 3 + r), p, q, r), a.stage(a.load(w, o * 6 + s * 3 + t), o, s, t)
    i, j, k, m = a.axes(12, 5, 2, 3)
    summed = UOp(Ops.REDUCE, dtypes.float32, (a.read(first, i, k, m) * a.read(second, j, k, m), k, m), ("ADD", 1))
    u, v, n = a.axes(12, 2, 3)
    product, copy = a.store(y, i * 5 + j, summed, i, j), a.store(z, u * 6 + v * 3 + n, a.read(first, u, v, n), u, v, n)
    assert flatten(a.sink(product), product).op is Ops.SINK
    with pytest.raises(KernelOptError, match="read by other stages too"):
        flatten(a.sink(product, copy), product)


def test_an_image_that_is_padding_alone() -> None:
    """No row of the window is inside the image."""
    for image in (data(2, 4, 1, 5), data(2, 1, 5, 4).permute(0, 3, 1, 2)):
        ast = kernel_of(image.conv2d(data(3, 4, 1, 3), stride=(3, 1), padding=(1, 0)))
        with pytest.raises(KernelOptError, match="padding"):
            flatten(ast, ast.src[0])


def test_axes_that_vary_stay() -> None:
    """For a batch whose size is a variable, the pixels are merged and the batch stays a separate axis."""
    n = svod.Variable("n", 1, 5)
    ast = kernel_of(data(5, 3, 6, 7).shrink([(0, n), None, None, None]).conv2d(data(4, 3, 3, 3)))
    flat = flatten(ast, ast.src[0])
    assert [sy.extent_of(r) for r in flat.src[0].src[2:]] == [5, 4, 20] and sy.is_symbolic(flat.src[0].src[2])
