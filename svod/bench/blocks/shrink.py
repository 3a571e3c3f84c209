"""Makes a block smaller while it keeps a property: layers are left out, bodies opened, sizes halved, the dtype becomes float32.

    shrink(block, shows)    the last of ever smaller blocks for which `shows` was true

A step goes to the first of `smaller_blocks` that has the property; blocks that leave out most come first. Every step decreases `size_of`,
so the steps end even without a limit on the blocks that are tried.
"""
from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from math import log2, prod

from svod.bench.blocks.block import Block, BlockLayer, Form, Value, every_layer
from svod.bench.blocks.vocabulary import MisfitError, check_block

MOST_JUDGED = 40        # most blocks that are judged for one result


def shrink(block: Block, shows: Callable[[Block], bool], most: int = MOST_JUDGED) -> Block:
    """The smallest block found for which `shows` is true. `most`: the largest number of blocks that `shows` is called for."""
    judged: set[Block] = {block}
    while True:
        for smaller in smaller_blocks(block):
            if smaller in judged or not _is_block(smaller):
                continue
            if len(judged) > most:
                return block
            judged.add(smaller)
            if shows(smaller):
                block = smaller
                break
        else:
            return block


def size_of(block: Block) -> float:
    """A number that every step of `shrink` decreases. It counts layers, and logarithms of their parameters and of the input's extents."""
    values = [abs(v) for layer in every_layer(block.layers) for _, v in layer.values if isinstance(v, int)]
    return (8.0 * sum(1 for _ in every_layer(block.layers)) + log2(prod(block.input.shape)) + sum(log2(1 + v) for v in values)
            + (0 if block.input.dtype == "float32" else 1))


def smaller_blocks(block: Block) -> Iterator[Block]:
    """The blocks that are one step smaller, those that leave out most first. Some are not valid: their layers do not fit together."""
    layers = block.layers
    if len(layers) > 3:
        half = len(layers) // 2
        yield from (replace(block, layers=part) for part in (layers[:half], layers[half:]))
    yield from (replace(block, layers=part) for part in _shorter(layers) if part)
    for axis, n in enumerate(block.input.shape):
        if n > 1:
            yield replace(block, input=Form((*block.input.shape[:axis], n // 2, *block.input.shape[axis + 1:]), block.input.dtype))
    yield from (replace(block, layers=changed) for changed in _with_less(layers))
    if block.input.dtype == "bfloat16":
        yield replace(block, input=Form(block.input.shape, "float32"))


def _shorter(layers: tuple[BlockLayer, ...]) -> Iterator[tuple[BlockLayer, ...]]:
    """The chain without one of its layers, or with the body of a layer in its place."""
    for i, layer in enumerate(layers):
        before, after = layers[:i], layers[i + 1:]
        yield before + after
        if layer.body:
            yield before + layer.body + after
            yield from ((*before, replace(layer, body=body), *after) for body in _shorter(layer.body) if body)


def _with_less(layers: tuple[BlockLayer, ...]) -> Iterator[tuple[BlockLayer, ...]]:
    """The chain with one parameter decreased: to 1, to half of it, or to the odd number next to the half."""
    for i, layer in enumerate(layers):
        before, after = layers[:i], layers[i + 1:]
        for place, (name, value) in enumerate(layer.values):
            for less in _less(name, value):
                values = (*layer.values[:place], (name, less), *layer.values[place + 1:])
                yield (*before, replace(layer, values=values), *after)
        yield from ((*before, replace(layer, body=body), *after) for body in _with_less(layer.body))


def _less(name: str, value: Value) -> list[int]:
    if name == "axis" or not isinstance(value, int) or value <= 1:
        return []
    return [v for v in dict.fromkeys((1, value // 2, value // 2 | 1)) if v < value]


def _is_block(block: Block) -> bool:
    try:
        check_block(block)
    except MisfitError:
        return False
    return True
