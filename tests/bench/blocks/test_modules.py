"""Blocks in PyTorch: every layer has the form that the vocabulary says, and svod computes what eager does."""
from __future__ import annotations

import logging

import pytest

from svod.bench.blocks.block import Block, BlockLayer, Form
from svod.bench.blocks.families import FAMILIES, drawn_block, tolerance_of
from svod.bench.blocks.vocabulary import BRANCHES, KINDS, MisfitError, form_after, forms_of
from svod.bench.suites.random_kernels import Draw
from svod.bench.suites.reference import difference

torch = pytest.importorskip("torch")

from svod.bench.blocks import modules  # noqa: E402
from svod.bench.blocks.modules import in_double, make_block  # noqa: E402

QUICK = ("tokens", "einsum", "program")     # families of blocks that svod compiles in half a second
SHAPES = sorted({shape for family in FAMILIES.values() for shape in family.small})


def test_each_layer_of_the_vocabulary_is_there() -> None:
    assert {*modules.MODULE_LAYERS, *modules.WEIGHTED_LAYERS, *modules.FUNCTION_LAYERS, *BRANCHES} == set(KINDS)


@pytest.mark.parametrize("op", [op for op in KINDS if op not in BRANCHES])
def test_forms_are_those_of_pytorch(op: str) -> None:
    ran = 0
    shapes = [s for s in SHAPES if len(s) in KINDS[op].ranks][::-1]
    for shape, dtype in ((s, d) for s in shapes[:4] for d in ("float32", "bfloat16", "int32")):
        layer = BlockLayer(op, tuple(KINDS[op].draw(Draw(f"{op} {shape} {dtype}"), shape).items()))
        try:
            expected = form_after(Form(shape, dtype), layer)
        except MisfitError:
            continue
        module, args, kwargs = make_block(Block("test", Form(shape, dtype), (layer,)))
        with torch.inference_mode():
            got = module(*args, **kwargs)
        assert Form(tuple(got.shape), str(got.dtype).removeprefix("torch.")) == expected, layer
        ran += 1
    assert ran


@pytest.mark.parametrize("family", FAMILIES)
def test_a_drawn_block_runs_and_is_that_of_its_seed(family: str) -> None:
    for number in range(6):
        block = drawn_block(family, 11, number, small=True)
        results = []
        for _ in range(2):
            torch.manual_seed(1)
            module, args, kwargs = make_block(block)
            with torch.inference_mode():
                results.append(module(*args, **kwargs))
        assert torch.equal(*results) and tuple(results[0].shape) == forms_of(block.input, block.layers)[-1].shape, block


def compared(block: Block) -> bool:
    """Compare svod's result of a block with that in float64. False, without a comparison, for a block that eager computes inexactly."""
    import svod.torch

    torch.manual_seed(2)
    made = make_block(block)
    module, args, kwargs = made
    with torch.inference_mode():
        double, wide, _ = in_double(made)
        exact, eager = double(*wide), module(*args, **kwargs)
        compiled = svod.torch.compile(module, *args, options={"db": ":none:"}, **kwargs)
        of_eager, of_svod = (difference([t.double().numpy()], [exact.double().numpy()], "") for t in (eager, compiled(*args, **kwargs)))
    is_exact = of_eager <= tolerance_of(block)
    assert of_svod <= tolerance_of(block) or not is_exact, (str(block), of_svod)
    return is_exact


@pytest.mark.parametrize("family", [pytest.param(f, marks=[] if f in QUICK else pytest.mark.slow) for f in FAMILIES])
def test_svod_agrees_with_eager(family: str, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.ERROR, "svod.torch")
    assert compared(drawn_block(family, 3, 0, small=True))


@pytest.mark.slow
@pytest.mark.parametrize("family", FAMILIES)
def test_svod_agrees_with_eager_on_many(family: str, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.ERROR, "svod.torch")
    assert sum(compared(drawn_block(family, 3, number, small=True)) for number in range(1, 12)) >= 8
