"""The families of random blocks. A seed and a number give the same block on every machine; the block's name has both.

    block_image_7_12        block 12 of the family image under the seed 7
"""
from __future__ import annotations

import fnmatch
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import cycle, islice
from math import prod

from svod.bench.blocks.block import Block, BlockLayer, Form, every_layer, parse_block
from svod.bench.blocks.vocabulary import (
    BRANCHES,
    INTEGER_TYPES,
    KINDS,
    OPENING,
    POINTWISE,
    STEPPED,
    MisfitError,
    Shape,
    check_block,
    fit,
    form_after,
    forms_of,
)
from svod.bench.suites.cases import Case, whole_model
from svod.bench.suites.random_kernels import Draw
from svod.errors import ConfigError

BLOCK_SUITE = "blocks"
BLOCK_COUNT = 100
SLOWNESS_LIMIT = 1.1                     # multiple of eager's time above which a block is reported
REACH = 40                      # for a pattern, at most this many times the wanted number of blocks are searched for matching names
MOST_LAYERS = 4                 # most drawn layers of a block, without activations and bodies
MOST_NUMBERS = 1_500_000        # most elements of a tensor between two layers
ATTEMPTS = 30                   # draws of a layer until one fits
# largest allowed difference to the result in float64, divided by the largest value
TOLERANCES = {"float32": 1e-3, "bfloat16": 6e-2, "int32": 0.0}
STEPPED_TOLERANCE = 4e-2


@dataclass(frozen=True)
class BlockFamily:
    """A family of blocks. `ops`: its layers with their frequencies. `shapes`: the shapes of its inputs, one of which is drawn; an axis
    has two numbers, the least and the largest extent, or else a list of extents. `small`: shapes of small inputs, for tests. `integers`:
    the number of blocks in 10 that take integers."""

    ops: Mapping[str, int]
    shapes: Sequence[tuple[tuple[int, ...], ...]]
    small: Sequence[Shape]
    integers: int = 0


_ALONG_AXES = {"softmax": 1, "log_softmax": 1, "standardise": 2, "rms_norm": 1, "unit_length": 1, "center": 1, "scale": 1, "offset": 1}
_BRANCHES = {"residual": 3, "concat": 2, "gate": 1}
_SPACE = {
    **_ALONG_AXES, **_BRANCHES, "conv": 9, "transposed": 2, "batch_norm": 3, "group_norm": 1, "instance_norm": 1, "layer_norm": 1,
    "max_pool": 2, "avg_pool": 2, "adaptive_pool": 1, "resample": 2, "channel_shuffle": 1, "se": 1, "space_softmax": 1, "glu": 1,
    "cumsum": 1}
FAMILIES: Mapping[str, BlockFamily] = {
    "image": BlockFamily(
        {**_SPACE, "conv_row": 1, "pixel_shuffle": 1, "pixel_unshuffle": 1, "reflect_pad": 1, "flip": 1},
        [((1, 1, 2), (16, 24, 32, 48, 64, 96), (14, 60), (14, 60)), ((1,), (3, 8, 16), (56, 160), (56, 160))],
        [(1, 8, 9, 8), (2, 4, 8, 12)]),
    "signal": BlockFamily(
        {**_SPACE, "reflect_pad": 1, "roll": 1}, [((1, 1, 4), (16, 32, 64, 80, 128), (200, 3000))], [(2, 8, 20)]),
    "volume": BlockFamily(
        _SPACE, [((1,), (4, 8, 16, 24, 32), (6, 20), (14, 40), (14, 40))], [(1, 4, 6, 8, 5)]),
    "tokens": BlockFamily(
        {**_ALONG_AXES, **_BRANCHES, "linear": 5, "layer_norm": 2, "attention": 4, "swiglu": 2, "token_conv": 1, "rotary": 1,
         "interleave": 1, "glu": 2, "cumsum": 1, "shift": 2, "repeat": 1, "transpose": 1},
        [((1, 4), (20, 200), (64, 96, 128, 192, 256, 384)), ((1,), (1, 16), (256, 512, 768, 1024))], [(2, 8, 16)]),
    "recurrent": BlockFamily(
        {"lstm": 4, "gru": 4, "rnn": 1, "lstm_cell": 3, "gru_cell": 3, "moving_state": 3, "linear": 2, "layer_norm": 1, "residual": 1,
         "standardise": 1, "concat": 1},
        [((1, 8), (6, 24), (32, 64, 100, 256)), ((1, 2), (30, 80), (32, 64, 128))], [(2, 4, 16)]),
    "indexing": BlockFamily(
        {"gather": 3, "select": 3, "scatter_add": 3, "index_add": 2, "put_rows": 1, "sort": 3, "sort_others": 3, "topk": 3,
         "masked_fill": 1, "tril": 1, "flip": 1, "roll": 1, "repeat": 1, "cummax": 1, "embedding": 5, "one_hot": 2, "bucketize": 2,
         "softmax": 2, "linear": 1, "residual": 1, "concat": 1},
        [((16, 1000), (16, 1000)), ((100, 5000),), ((2, 16), (16, 200), (16, 200))], [(12, 16), (20,), (2, 6, 8)], 4),
    "einsum": BlockFamily(
        {**_ALONG_AXES, "einsum": 8, "einsum_self": 3, "transpose": 2, "residual": 1, "sum": 1, "max": 1},
        [((1, 32), (16, 200), (16, 200))], [(3, 8, 16)]),
    "quantised": BlockFamily(
        {"quantised": 3, "quantised_channels": 2, "int8_linear": 5, "int4_linear": 4, "int8_product": 4, "layer_norm": 1, "rms_norm": 1,
         "linear": 1, "residual": 2},
        [((1,), (256, 512, 1024)), ((2, 200), (128, 200, 256, 512, 1024))], [(20, 16)]),
    "program": BlockFamily(
        {"stencil5": 3, "stencil9": 2, "edges": 2, "life": 4, "moving_mean": 2, "moving_max": 2, "window_product": 2, "n_body": 4,
         "distances": 4, "gram": 2, "nearest": 2, "histogram": 1, "bin_counts": 2, "polynomial": 2, "logistic": 1, "black_scholes": 2,
         "cumsum": 2, "diff": 2, "sum": 2, "max": 2, "variance": 2, "logsumexp": 1, "logcumsumexp": 1, "center": 1, "transpose": 2,
         "softmax": 1, "topk": 1},
        [((64, 1000), (64, 1000)), ((200, 1500), (2, 4)), ((20_000, 1_000_000),)], [(12, 16), (20, 3), (40,)], 2),
}
# the families of successive blocks; after the last, the list starts again
DEAL = ("image", "tokens", "signal", "image", "volume", "program", "image", "indexing", "tokens", "einsum", "image", "recurrent", "program",
        "signal", "quantised", "volume", "image", "tokens", "indexing", "program")
_BLOCK_NAME = re.compile(r"block_([a-z]+)_(\d+)_(\d+)")


def drawn_block(family: str, seed: int, number: int, *, small: bool = False) -> Block:
    """Draw block `number` of a family under a seed. `small`: on one of the family's small inputs."""
    kinds, d = FAMILIES[family], Draw(f"{family} {seed} {number}")
    dtype = "int32" if d.choice(*range(10)) < kinds.integers else d.choice("float32", "float32", "float32", "float32", "bfloat16")
    shape = d.choice(*(kinds.small if small else [tuple(_extent(d, part) for part in parts) for parts in kinds.shapes]))
    form = Form(shape, dtype)
    layers: list[BlockLayer] = []
    for _ in range(d.choice(*range(1, MOST_LAYERS + 1))):
        layer = _drawn_layer(d, kinds, form, opening=not layers)
        if layer is not None:
            layers.append(layer)
            form = form_after(form, layer)
        if form.dtype not in INTEGER_TYPES and d.choice(0, 0, 1):
            layers.append(BlockLayer(d.choice(*POINTWISE)))
    return Block(family, Form(shape, dtype), tuple(layers or [BlockLayer("flip")]))


def _extent(d: Draw, among: tuple[int, ...]) -> int:
    """Draw an extent: between two numbers, both included, or one of several."""
    if len(among) != 2:
        return d.choice(*among)
    low, high = among
    return d.extent(low, high) if high >= 16 else d.choice(*range(low, high + 1))


def _drawn_layer(d: Draw, family: BlockFamily, form: Form, *, opening: bool, within: bool = False) -> BlockLayer | None:
    """Draw a layer that fits the form; None if none is found. `opening`: it may be a layer that takes only a block's input (OPENING).
    `within`: it is for a body, which has no branches in it."""
    deck = [op for op, often in family.ops.items() for _ in range(often)
            if (opening or op not in OPENING) and not (within and op in BRANCHES)]
    for _ in range(ATTEMPTS):
        op = d.choice(*deck)
        body = _drawn_body(d, family, form) if op in BRANCHES else ()
        try:
            fit(op not in BRANCHES or len(body) > 0, "no body was drawn")
            values = KINDS[op].draw(d, form.shape) if len(form.shape) in KINDS[op].ranks else {}
            layer = BlockLayer(op, tuple(values.items()), body)
            if max(prod(f.shape) for f in (form_after(form, layer), *forms_of(form, body))) <= MOST_NUMBERS:
                return layer
        except MisfitError:
            continue
    return None


def _drawn_body(d: Draw, family: BlockFamily, form: Form) -> tuple[BlockLayer, ...]:
    """Draw the body of a branch: at most three layers whose result has the form of their input, and activations."""
    layers: list[BlockLayer] = []
    for _ in range(d.choice(1, 2, 3)):
        layer = _drawn_layer(d, family, form, opening=False, within=True)
        if layer is not None and form_after(form, layer) == form:
            layers.append(layer)
            if form.dtype not in INTEGER_TYPES and d.choice(0, 1):
                layers.append(BlockLayer(d.choice(*POINTWISE)))
    return tuple(layers)


# -- cases ------------------------------------------------------------------------------------------------

def block_named(name: str) -> Block | None:
    """The block of a name such as block_image_7_12, or of a text such as `image float32 1x8x9x9: relu`; None for other names. Raises
    ConfigError for a text that is no block."""
    found = _BLOCK_NAME.fullmatch(name)
    if found is not None:
        return drawn_block(found[1], int(found[2]), int(found[3])) if found[1] in FAMILIES else None
    if ":" not in name:
        return None
    block = parse_block(name)
    try:
        check_block(block)
        kinds = FAMILIES.get(block.family)
        if kinds is None:
            raise MisfitError(f"there is no family {block.family!r}; the families are {', '.join(FAMILIES)}")
        ranks = sorted({len(parts) for parts in kinds.shapes})
        fit(len(block.input.shape) in ranks, f"an input of the family {block.family} has {' or '.join(map(str, ranks))} axes, not those of "
                                             f"{block.input}")
    except MisfitError as e:
        raise ConfigError(f"{name!r} is no block: {e}") from e
    return block


def tolerance_of(block: Block) -> float:
    """The largest allowed difference of a block's outputs. Raises ConfigError for a dtype that blocks do not have."""
    stepped = STEPPED_TOLERANCE if any(x.op in STEPPED for x in every_layer(block.layers)) else 0.0
    if block.input.dtype not in TOLERANCES:
        raise ConfigError(f"blocks of {block.input.dtype} are not compared; the dtypes are {', '.join(TOLERANCES)}")
    result = forms_of(block.input, block.layers)[-1].dtype
    return max(TOLERANCES[block.input.dtype], TOLERANCES.get(result, 0.0), stepped)


def block_case(block: Block, name: str = "", limit: float = SLOWNESS_LIMIT) -> Case:
    """The case of a block; without a name, its text is its name. `limit`: see `Case.limit`."""
    made = whole_model(name or str(block), str(block), "blocks", block.family, tolerance_of(block), block=block, limit=limit)
    return replace(made, out_dtype=block.input.dtype)


def block_cases(count: int, seed: int, pattern: str = "*", limit: float = SLOWNESS_LIMIT) -> list[Case]:
    """The cases of the blocks that `pattern` selects. Its parts, joined by commas, are names of blocks, texts of blocks, and patterns;
    for the patterns, the first `count` blocks of the seed with a matching name are taken. Raises ConfigError for a text that is no
    block."""
    parts = [p.strip() for p in pattern.split(",") if p.strip()]
    named = {p: block for p in parts if (block := block_named(p)) is not None}
    globs = [p for p in parts if p not in named]
    dealt = _dealt(seed, REACH * count if globs else 0)
    names = [*named, *islice((n for n in dealt if any(fnmatch.fnmatchcase(n, g) for g in globs)), count)]
    return [block_case(block, name, limit) for name in names if (block := block_named(name)) is not None]


def _dealt(seed: int, count: int) -> Iterator[str]:
    """The names of the first `count` blocks of a seed."""
    numbers = dict.fromkeys(DEAL, 0)
    for family in islice(cycle(DEAL), count):
        yield f"block_{family}_{seed}_{numbers[family]}"
        numbers[family] += 1
