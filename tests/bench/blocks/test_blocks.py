"""Blocks: their texts, their draws, the forms that layers are said to have, and ever smaller blocks."""
from __future__ import annotations

import subprocess
import sys
from collections import Counter
from math import prod

import pytest

from svod.bench.blocks.block import Block, BlockLayer, Form, every_layer, parse_block
from svod.bench.blocks.families import DEAL, FAMILIES, MOST_NUMBERS, block_cases, block_named, drawn_block, tolerance_of
from svod.bench.blocks.shrink import shrink, size_of, smaller_blocks
from svod.bench.blocks.vocabulary import KINDS, MisfitError, check_block, forms_of
from svod.bench.suites.suites import select_cases
from svod.errors import ConfigError

TEXT = "image float32 1x16x20x20: batch_norm; residual {conv out=32 k=3; conv out=16 k=5; relu}; resample percent=150 mode=linear; gelu"


def test_a_text_is_read_back() -> None:
    block = parse_block(TEXT)
    assert str(block) == TEXT and block.input == Form((1, 16, 20, 20), "float32")
    body = BlockLayer("conv", (("out", 32), ("k", 3))), BlockLayer("conv", (("out", 16), ("k", 5))), BlockLayer("relu")
    assert block.layers[1] == BlockLayer("residual", (), body)
    assert forms_of(block.input, block.layers)[-1].shape == (1, 16, 30, 30)
    for case in block_cases(200, 3):
        assert parse_block(case.title) == case.options["block"] and not set(case.title) & set(",*?[]'\"$")


@pytest.mark.parametrize(("text", "words"), [
    ("image float32 1x8: ", "it has no layers"), ("float32: relu", "a block reads like"), ("x float32 8: relu}", "nothing opens the '}'"),
    ("image float32 1x8: residual {relu", "the brace behind residual is not closed"), ("image float32 8: conv k", "'k' in the layer conv"),
    ("image float32 1x8: nonsuch", "there is no layer 'nonsuch'; the layers are relu, gelu"),
    ("image float32 1x8: conv out=8 k=3", "conv does not take float32 1x8"), ("image float32 1x8x9x9: conv out=8 k=2", "an odd kernel"),
    ("image float32 1x8x9x9: residual {conv out=9 k=3}", "the body of residual returns float32 1x9x9x9"),
    ("image int32 1x8: gelu", "gelu does not take int32"), ("image float32 8: softmax axis=1", "there is no axis 1"),
    ("image float32 8: softmax axis=x", "axis=x is no integer"), ("image float32 8: residual", "residual has a body"),
    ("image float32 8: softmax axis=-2", "there is no axis -2"), ("image float32 1x8x9x9: conv out=0 k=3", "out=0 is no integer from 1 on"),
    ("image float32 1x8x9x9: conv out=8 k=3 stride=2", "conv has no parameter stride; conv has out, k, s=1, d=1, g=1"),
    ("image float32 1x8x9x9: relu k=3", "relu has no parameter k; relu has no parameters"),
    ("tokens float32 1x8x9: lstm layers=2", "lstm needs out; lstm has out, layers=1, both=0"),
    ("tokens float32 1x8x9: linear out=3 out=4", "linear gives a parameter twice"),
    ("picture float32 1x8x9x9: relu", "there is no family 'picture'; the families are image, signal"),
    ("image float32 1x8: relu", "an input of the family image has 4 axes, not those of float32 1x8"),
    ("program float32 8x8x8: relu", "an input of the family program has 1 or 2 axes"),
    ("image float32 0x8x9x9: relu", "an input of float32 0x8x9x9 has no numbers; each of its sizes is 1 or more"),
    ("image float32 1x8x2x2: max_pool k=3 s=2", "a window of 3 is larger than the input"),
    ("einsum float32 2x4x4: einsum_self e=abc.cd.abd", "there is no einsum 'abc.cd.abd' of this kind"),
])
def test_a_text_that_is_no_block_says_why(text: str, words: str) -> None:
    with pytest.raises(ConfigError, match=words.replace("{", r"\{").replace("}", r"\}")):
        block_named(text)


def test_a_seed_and_a_number_give_the_same_block_everywhere() -> None:
    """Reports name blocks, which must not change with Python or NumPy, and are drawn again from their names in other processes."""
    assert str(drawn_block("image", 7, 0)) == ("image float32 1x8x137x64: scale axis=2; conv out=8 k=1 g=8; conv out=8 k=3 s=2 d=2; "
                                               "leaky_relu; unit_length axis=2")
    names = [c.name for c in block_cases(40, 7)]
    assert [c.title for c in block_cases(40, 7)] == [str(block_named(n)) for n in names] != [c.title for c in block_cases(40, 8)]
    program = "from svod.bench.blocks.families import block_cases; print(*(c.title for c in block_cases(40, 7)), sep='\\n')"
    again = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True).stdout.splitlines()
    assert again == [c.title for c in block_cases(40, 7)]


def test_families_are_dealt_and_named() -> None:
    dealt = Counter(c.group for c in block_cases(len(DEAL), 0))
    assert dealt == Counter(DEAL) and dealt.keys() == FAMILIES.keys()
    assert [c.name for c in select_cases("blocks", "block_image_*,block_volume_2_1", seed=2, count=2)] == [
        "block_volume_2_1", "block_image_2_0", "block_image_2_1"]
    assert [c.name for c in select_cases("blocks", TEXT)] == [TEXT]
    assert [c.name for c in select_cases("blocks", "block_einsum_5_17")] == ["block_einsum_5_17"]
    with pytest.raises(ConfigError, match="no kernel of suite 'blocks' matches 'block_nonsuch_1_2'"):
        select_cases("blocks", "block_nonsuch_1_2")
    assert block_named("gemm_512") is None


def test_drawn_blocks_fit_and_have_all_layers() -> None:
    seen: set[str] = set()
    dtypes: Counter[str] = Counter()
    for case in block_cases(1500, 1):
        block: Block = case.options["block"]
        forms = forms_of(block.input, block.layers)
        assert max(prod(f.shape) for f in forms) <= MOST_NUMBERS
        seen |= {layer.op for layer in every_layer(block.layers)}
        dtypes[block.input.dtype] += 1
    assert seen == set(KINDS)
    assert dtypes["float32"] > 3 * dtypes["bfloat16"] > 0 and dtypes["int32"] > 30


# -- smaller blocks ---------------------------------------------------------------------------------------

def test_every_step_is_smaller() -> None:
    for case in block_cases(60, 4):
        block: Block = case.options["block"]
        assert all(size_of(s) < size_of(block) for s in smaller_blocks(block)), block


def test_the_smallest_block_keeps_the_property() -> None:
    judged: list[Block] = []

    def has_wide_convolution(block: Block) -> bool:
        check_block(block)      # only blocks whose layers fit are judged
        judged.append(block)
        return any(x.op == "conv" and int(x.given["k"]) > 3 for x in every_layer(block.layers)) and block.input.shape[-1] >= 5
    smallest = shrink(parse_block(TEXT.replace("float32", "bfloat16")), has_wide_convolution, most=1000)
    assert str(smallest) == "image float32 1x1x1x5: conv out=1 k=5"
    assert len(judged) == len(set(judged)) < 60


def test_shrinking_ends() -> None:
    for seed in range(20):
        block = drawn_block("image", seed, 0)
        smallest = shrink(block, lambda b: True, most=10_000)
        assert smallest.input.shape == (1,) * 4 or len(smallest.layers) == 1
        assert shrink(block, lambda b: False) == block
    few: list[Block] = []
    shrink(drawn_block("image", 1, 1), lambda b: bool(few.append(b)), most=5)
    assert len(few) == 5


def test_a_misfit_is_no_smaller_block() -> None:
    with pytest.raises(MisfitError, match="at least one layer"):
        check_block(Block("image", Form((1, 2), "float32"), ()))


@pytest.mark.parametrize("dtype", ["float64", "floaty"])
def test_a_block_of_a_dtype_without_a_tolerance_is_refused(dtype: str) -> None:
    with pytest.raises(ConfigError, match=f"blocks of {dtype} are not compared; the dtypes are float32"):
        tolerance_of(parse_block(f"image {dtype} 1x4x8x8: relu"))
