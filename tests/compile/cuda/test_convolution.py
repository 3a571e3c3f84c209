"""Convolutions by matrix instructions: the heuristic's kernels give right numbers for any extents, strides, dilations and groups, and
copies of their windows are as wide as the rows of channels allow."""
from __future__ import annotations

import itertools
import random
import re
from math import prod

import numpy as np
import pytest

import svod
from svod.compile.cuda import ptxas
from svod.compile.cuda.ptx import emit_ptx
from svod.compile.cuda.render import render, without_assumptions
from svod.compile.lower.lower import lower
from svod.config import PrepareConfig
from svod.core.cost.groups.group_sketch import group_heuristic
from svod.core.graph import graph
from svod.core.ir.dtype import dtypes
from svod.core.kernel.apply import apply_opts
from svod.core.kernel.chain_text import parse_chain
from svod.core.kernel.kernel import Kernel
from svod.core.kernel.scheduler import Scheduler
from svod.errors import KernelOptError
from svod.tensor import Tensor
from tests.agreement import Case
from tests.compile.cuda.emulator import run_program
from tests.compile.cuda.fake_driver import FakeDriver, stand_in
from tests.compile.cuda.target import card_target
from tests.compile.cuda.test_core_suite import A100, H100
from tests.core.corpus import kernel_of
from tests.draws import count

STAGED = "STAGE(s0, r0) STAGE(s1, r0) UNROLL(r0.in2, 0) PIPELINE(r0, 2)"
CHAINS = {"sm_75": "TC(r0, mma_f16k8,{m},{o}) UPCAST({m}, 2) TILE(r0, 2) ", "sm_80": "TC(r0, mma_bf16,{m},{o}) UPCAST({m}, 2) TILE(r0, 2) ",
          "sm_90a": "TC(r0, wgmma_bf16n64,{m},{o}) TILE(r0, 2) "}


def data(*shape: int, dtype: str = "bfloat16") -> Tensor:
    """Make a tensor in memory; kernels depend only on its shape and type."""
    return Tensor.from_uop(graph.reshape(graph.buffer(getattr(dtypes, dtype), prod(shape)), shape))


def convolution(rng: random.Random, dtype: str) -> Tensor:
    """Make a convolution of an image and weights that are stored with their channels last."""
    groups, taps, stride, dilation = rng.choice((1, 1, 2)), rng.choice((1, 2, 3)), rng.choice((1, 1, 2)), rng.choice((1, 1, 2))
    n, c, o, size = rng.randint(1, 3), groups * rng.choice((1, 3, 8, 16, 24)), groups * rng.choice((3, 8, 17, 32)), rng.choice((5, 7, 8))
    x, w = data(n, size, size + 1, c, dtype=dtype), data(o, taps, taps, c // groups, dtype=dtype)
    y = x.permute(0, 3, 1, 2).conv2d(w.permute(0, 3, 1, 2), data(o, dtype=dtype), padding=rng.choice((0, 1)), stride=stride,
                                     dilation=dilation, groups=groups)
    return y.permute(0, 2, 3, 1).contiguous() if rng.random() < 0.6 else y


@pytest.mark.slow
@pytest.mark.parametrize("arch", CHAINS)
def test_random_convolutions(arch: str) -> None:
    dtype, ran = "float16" if arch == "sm_75" else "bfloat16", 0
    for seed in range(count(5)):
        kernel = Kernel(kernel_of(convolution(random.Random(f"{arch} {seed}"), dtype)))
        case, state = Case(kernel, seed), Scheduler(kernel, card_target(arch, group_threads=256))
        try:
            flat = apply_opts(state, parse_chain("FLATTEN(out)"))
        except KernelOptError:
            continue        # one tap of one channel
        grouped = len(flat.kernel.stages[flat.kernel.output].outs) > 2
        for m, o in (("o0", "o1"), ("o1", "o0"), ("o0", "o2"), ("o2", "o0"), ("o1", "o2"), ("o2", "o1"))[:6 if grouped else 2]:
            for staged in (STAGED, ""):
                try:
                    tried = apply_opts(state, parse_chain("FLATTEN(out) " + CHAINS[arch].format(m=m, o=o) + staged))
                    program = lower(tried)
                except KernelOptError:
                    continue
                args = case.fresh()
                run_program(program, tried.target, args, seed=seed)
                case.check(args, str(tried))
                ran += 1
    assert ran >= 3


def data_of(*shape: int) -> Tensor:
    """Make a tensor of small random integers, different for each shape."""
    return Tensor(np.random.default_rng(shape).integers(-2, 3, shape).astype(np.float32)).cast("bfloat16").realize()


CASES = {"3x3": (2, 16, 24, 7, 3, {"padding": 1}), "3x3_s2": (2, 16, 8, 9, 3, {"padding": 1, "stride": 2}), "1x1": (3, 24, 16, 5, 1, {}),
         "1x1_s2": (2, 16, 32, 7, 1, {"stride": 2}), "7x7_s2": (1, 3, 8, 13, 7, {"padding": 3, "stride": 2}),
         "dilated": (1, 8, 16, 8, 3, {"padding": 2, "dilation": 2}), "grouped": (1, 32, 32, 6, 3, {"padding": 1, "groups": 2})}


@pytest.mark.slow
@pytest.mark.parametrize(("name", "sizes"), [("3x3", H100), *zip(CASES, itertools.cycle([A100, H100]))])
def test_the_heuristics_plan(name: str, sizes: dict[str, int], monkeypatch: pytest.MonkeyPatch) -> None:
    """Of two convolutions with an activation between them, image and weights are rearranged once, and the second convolution copies
    nothing."""
    stand_in(FakeDriver(sizes=sizes), monkeypatch)
    n, c, o, size, taps, options = CASES[name]
    x, w, b, last = data_of(n, c, size, size), data_of(o, c // options.get("groups", 1), taps, taps), data_of(o), data_of(8, o, 1, 1)

    def network(x: Tensor, w: Tensor, b: Tensor, last: Tensor) -> Tensor:
        return x.conv2d(w, b, **options).relu().conv2d(last)
    y = network(x, w, b, last)
    plan = y.prepare(PrepareConfig(device="CUDA", object_cache=":none:", db=":none:"), constants=[w, b, last])
    plan.execute()
    chains = [k.chain for k in plan.kernels]
    assert any("mma_" in chain and "FLATTEN" in chain for chain in chains), chains
    want = network(*[t.cast("float32") for t in (x, w, b, last)]).numpy()
    np.testing.assert_allclose(y.cast("float32").numpy(), want, rtol=0.02, atol=0.02 * np.abs(want).max())


def conv_3x3(channels: int) -> Kernel:
    x, w = data(8, 14, 14, channels), data(64, 3, 3, channels)
    return Kernel(kernel_of(x.permute(0, 3, 1, 2).conv2d(w.permute(0, 3, 1, 2), padding=1).permute(0, 2, 3, 1).contiguous()))


@pytest.mark.slow
@pytest.mark.parametrize("arch", ["sm_80", "sm_90", "sm_90a"])
def test_windows_are_copied_in_lines(arch: str) -> None:
    """Windows are copied in lines of 16 bytes of channels, none of which is read outside the image; no registers are spilled."""
    state = group_heuristic(Scheduler(conv_3x3(128), card_target(arch)))
    assert str(state.applied_opts[0]) == "FLATTEN(out)" and any(state.dots)
    ptx = emit_ptx(render(lower(state), state.target), arch)
    copies = re.findall(r"cp\.async\.c[ag]\.shared\.global \[[^\]]*\], \[[^\]]*\], (\d+)(, %r\d+)?;", ptx)
    assert {size for size, _ in copies} == {"16"} and any(given for _, given in copies) and "ld.global.u16" not in ptx
    if ptxas.ptxas_version() is not None:
        assert all(r.spill_stores == r.stack == 0 for r in ptxas.assemble(ptx, arch)[1])


def test_arguments_that_begin_anywhere() -> None:
    """For arguments of unknown alignment, windows are loaded without alignment requirements, and nothing is read outside the image."""
    kernel = Kernel(kernel_of(data(1, 5, 5, 8).permute(0, 3, 1, 2).conv2d(
        data(16, 3, 3, 8).permute(0, 3, 1, 2), padding=1)))
    chain = "FLATTEN(out) TC(r0, mma_bf16,o0,o1) STAGE(s0, r0) STAGE(s1, r0) PIPELINE(r0, 2)"
    state = apply_opts(Scheduler(kernel, card_target("sm_80")), parse_chain(chain))
    source = without_assumptions(render(lower(state), state.target))
    assert "cp.async.cg.shared.global.16" not in source.replace("declare void @llvm.nvvm.cp.async", "") and "masked.load" in source
    emit_ptx(source, "sm_80")




def test_weights_are_turned_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """A separate plan rearranges the weights: runs do not repeat it, and another plan with the same weights reuses the result."""
    stand_in(FakeDriver(sizes=A100), monkeypatch)
    x, w = data_of(1, 8, 6, 6), data_of(16, 8, 3, 3)
    config = PrepareConfig(device="CUDA", object_cache=":none:", db=":none:")
    plans = [x.conv2d(w, padding=1).prepare(config, constants=[w]) for _ in range(2)]
    assert [[k.name for k in plan.kernels] for plan in plans] == [["copy_0", "conv_1"]] * 2
    turned = [{b.storage for b in plan.buffers if b.kind == "constant"} for plan in plans]
    assert turned[0] == turned[1] and len(turned[0]) == 1
    assert [k.name for k in x.conv2d(w, padding=1).prepare(config).kernels] == ["copy_0", "copy_1", "conv_2"]


def test_the_kernels_of_another_device() -> None:
    """If kernels are captured for a card while a program runs on the CPU, the captured kernels are the card's, and the results do not
    change."""
    x, w = data_of(1, 8, 6, 6), data_of(16, 8, 3, 3)
    y, again = x.conv2d(w, padding=1), x.conv2d(w, padding=1)
    plan = y.prepare(PrepareConfig(capture_device="CUDA:sm_80", db=":none:"))
    plan.execute()
    assert [k.name for k in plan.kernels] == ["copy_0", "copy_1", "conv_2"]
    np.testing.assert_array_equal(y.cast("float32").numpy(), again.cast("float32").numpy())


@pytest.mark.slow
def test_a_batch_of_any_size(monkeypatch: pytest.MonkeyPatch) -> None:
    """The pixels of an image are one merged axis; the images stay a separate axis, because their number is a variable."""
    stand_in(FakeDriver(sizes=A100), monkeypatch)
    n, x, w, b = svod.Variable("n", 1, 4), data_of(4, 8, 6, 7), data_of(16, 8, 3, 3), data_of(16)

    def network(x: Tensor) -> Tensor:
        return x.conv2d(w, b, padding=1).relu()
    y = network(x.shrink([(0, n), None, None, None])).cast("float32")
    plan = y.prepare(PrepareConfig(device="CUDA", object_cache=":none:", db=":none:"), constants=[w, b])
    assert any("FLATTEN" in k.chain and "mma_" in k.chain for k in plan.kernels)
    want = network(x).cast("float32").numpy()
    for images in (4, 1, 3):
        plan.execute(n=images)
        np.testing.assert_array_equal(np.array(plan.outputs[0]).ravel()[:want[:images].size], want[:images].ravel())
