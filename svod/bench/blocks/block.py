"""A block as data: the form of its input, and a chain of layers with their parameters. Its text is read back by `parse_block`.

    image float32 1x32x28x40: conv out=64 k=3 s=1; relu; residual {batch_norm; conv out=64 k=3}

The text has no commas and no characters that are special in patterns, so it can stand where a command expects a name.
"""
from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import NamedTuple

from svod.errors import ConfigError

Value = int | str


class Form(NamedTuple):
    """The shape and the dtype of a tensor between two layers."""

    shape: tuple[int, ...]
    dtype: str

    def __str__(self) -> str:
        return f"{self.dtype} {'x'.join(map(str, self.shape))}"


@dataclass(frozen=True)
class BlockLayer:
    """One layer: `op` is its name in the vocabulary, `values` are its parameters. `body`: the layers inside, of a residual for example."""

    op: str
    values: tuple[tuple[str, Value], ...] = ()
    body: tuple[BlockLayer, ...] = ()

    @property
    def given(self) -> Mapping[str, Value]:
        """The layer's parameters by name."""
        return dict(self.values)

    def __str__(self) -> str:
        words = [self.op, *(f"{name}={value}" for name, value in self.values)]
        return " ".join([*words, *([f"{{{chain_words(self.body)}}}"] if self.body else [])])


@dataclass(frozen=True)
class Block:
    """A chain of layers from the vocabulary of a family, on an input of the form `input`."""

    family: str
    input: Form
    layers: tuple[BlockLayer, ...]

    def __str__(self) -> str:
        return f"{self.family} {self.input}: {chain_words(self.layers)}"


def chain_words(layers: tuple[BlockLayer, ...]) -> str:
    """The text of a chain of layers."""
    return "; ".join(map(str, layers))


def every_layer(layers: tuple[BlockLayer, ...]) -> Iterator[BlockLayer]:
    """The layers of a chain, each followed by the layers of its body."""
    for layer in layers:
        yield layer
        yield from every_layer(layer.body)


_BLOCK_HEAD = re.compile(r"\s*(\w+)\s+(\w+)\s+(\d+(?:x\d+)*)\s*:(.*)", re.DOTALL)
_BLOCK_TOKEN = re.compile(r"[{};]|[^\s{};]+")
_VALUE = re.compile(r"(\w+)=([\w.-]+)")


def parse_block(text: str) -> Block:
    """Parse the text of a block. Raises ConfigError, which says what is wrong with the text."""
    head = _BLOCK_HEAD.fullmatch(text)
    if head is None:
        raise ConfigError(f"{text!r} is no block; a block reads like: image float32 1x32x28x28: conv out=64 k=3; relu")
    tokens = _BLOCK_TOKEN.findall(head[4])
    layers, rest = _parse_chain(tokens)
    if rest or not layers:
        raise ConfigError(f"{text!r} is no block: " + (f"nothing opens the {rest[0]!r}" if rest else "it has no layers"))
    return Block(head[1], Form(tuple(map(int, head[3].split("x"))), head[2]), layers)


def _parse_chain(tokens: list[str]) -> tuple[tuple[BlockLayer, ...], list[str]]:
    """The layers at the start of `tokens`, and the rest from the brace that ends them."""
    layers: list[BlockLayer] = []
    while tokens and tokens[0] != "}":
        op, *tokens = tokens
        values: list[tuple[str, Value]] = []
        body: tuple[BlockLayer, ...] = ()
        while tokens and tokens[0] not in ("{", "}", ";"):
            found = _VALUE.fullmatch(tokens[0])
            if found is None:
                raise ConfigError(f"{tokens[0]!r} in the layer {op} is no parameter such as k=3")
            values.append((found[1], parsed_value(found[2])))
            tokens = tokens[1:]
        if tokens and tokens[0] == "{":
            body, tokens = _parse_chain(tokens[1:])
            if not tokens:
                raise ConfigError(f"the brace behind {op} is not closed")
            tokens = tokens[1:]
        layers.append(BlockLayer(op, tuple(values), body))
        if tokens and tokens[0] == ";":
            tokens = tokens[1:]
    return tuple(layers), tokens


def parsed_value(text: str) -> Value:
    """The value of a parameter: an integer, or a word."""
    return int(text) if re.fullmatch(r"-?\d+", text) else text
