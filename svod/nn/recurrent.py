"""Recurrent networks: cells, which compute one step, and layers of cells over sequences.

A layer multiplies the inputs of all steps with its weights in one product. The graph unrolls the steps; each consists of a product with the
last hidden state, and the gates. So the length of a sequence must be known, and an extent that depends on a variable raises ShapeError;
more than `MOST_STEPS` steps raise UnsupportedError.
With 16-bit floats, a step is computed in float32, and its states are rounded.
"""
from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

from svod.core.ir.variable import is_symbolic
from svod.errors import ShapeError, UnsupportedError
from svod.nn.module import Module, fan_in_bound, uniform
from svod.tensor import Tensor
from svod.tensor.precision import common_half, rounded, widened

MOST_STEPS = 2000       # most steps of all layers and directions that are unrolled; a step takes 6 ms to compile and 0.1 MB of memory

State = tuple[Tensor, ...]      # the hidden state; for an LSTM, the hidden state and the cell state
# a function from (product of the weights with the input, product with the last hidden state, last state) to the next state
Step = Callable[[Tensor, Tensor, State], State]


class Direction(NamedTuple):
    """The weights of one direction of a layer. `projection`: a matrix that makes the hidden state smaller."""

    weight_ih: Tensor
    weight_hh: Tensor
    bias_ih: Tensor | None = None
    bias_hh: Tensor | None = None
    projection: Tensor | None = None


def plain_step(activation: Callable[[Tensor], Tensor]) -> Step:
    """The step of a plain cell."""
    return lambda a, b, state: (activation(a.add(b)),)


def long_short_step(a: Tensor, b: Tensor, state: State) -> State:
    """The step of an LSTM cell."""
    i, f, g, o = a.add(b).chunk(4, -1)
    cell = f.sigmoid().mul(state[1]).add(i.sigmoid().mul(g.tanh()))
    return o.sigmoid().mul(cell.tanh()), cell


def gated_step(a: Tensor, b: Tensor, state: State) -> State:
    """The step of a GRU cell."""
    (ar, az, an), (br, bz, bn) = a.chunk(3, -1), b.chunk(3, -1)
    r, z = ar.add(br).sigmoid(), az.add(bz).sigmoid()
    n = an.add(r.mul(bn)).tanh()
    return (n.add(z.mul(state[0].sub(n))),)


def advance(step: Step, a: Tensor, weights: Direction, state: State) -> State:
    """The next state from the product of the weights with the input."""
    given = (a, weights.weight_hh, weights.bias_hh, weights.projection, state)
    dtype = common_half([t for t in (*given[:-1], *state) if t is not None])
    a, weight, bias, projection, state = widened(given)
    hidden, *others = step(a, state[0].linear(weight, bias), state)
    made = (hidden if projection is None else hidden.linear(projection), *others)
    return made if dtype is None else rounded(made, dtype)


def check_steps(what: str, steps: int, ways: int) -> None:
    """Raise UnsupportedError if `what` has too many steps to unroll. `ways`: the number of its layers times that of their directions."""
    if steps * ways > MOST_STEPS:
        raise UnsupportedError(f"{what} over {steps} steps; svod unrolls up to {MOST_STEPS // ways} of {ways} layers and directions")


def run_layers(step: Step, x: Tensor, start: State, directions: Sequence[Direction], bidirectional: bool) -> tuple[Tensor, State]:
    """The hidden states of the last layer at every step of x (length, batch, features), and the last states of every layer and direction.
    `start`: the first states, each (layers · directions, batch, features), in the order of `directions`. Raises UnsupportedError if there
    are too many steps to unroll."""
    check_steps("a recurrent layer", x.shape[0], len(directions))
    last: list[State] = []
    for first in range(0, len(directions), 1 + bidirectional):
        ways = []
        for backwards, weights in enumerate(directions[first:first + 1 + bidirectional]):
            outputs, state = _walk(step, x, weights, tuple(s[len(last)] for s in start), bool(backwards))
            ways.append(outputs)
            last.append(state)
        x = ways[0] if len(ways) == 1 else Tensor.cat(ways, -1)
    return x, tuple(Tensor.stack([s[k] for s in last]) for k in range(len(start)))


def _walk(step: Step, x: Tensor, weights: Direction, state: State, backwards: bool) -> tuple[Tensor, State]:
    """The hidden states of one direction of a layer at every step, and its last state."""
    products = x.linear(weights.weight_ih, weights.bias_ih).contiguous()
    outputs = []
    for t in range(x.shape[0])[::-1 if backwards else 1]:
        state = advance(step, products[t], weights, state)
        outputs.append(state[0])
    return Tensor.stack(outputs[::-1] if backwards else outputs), state


class _Gates(Module):
    """The computation of one step with `gates` blocks of weights and `states` state tensors."""

    gates = 1
    states = 1

    def _step(self) -> Step:
        raise NotImplementedError


class _Plain(_Gates):
    nonlinearity = "tanh"

    def _choose(self, nonlinearity: str) -> None:
        if nonlinearity not in ("tanh", "relu"):
            raise UnsupportedError(f"{type(self).__name__} with nonlinearity {nonlinearity!r}: use 'tanh' or 'relu'")
        self.nonlinearity = nonlinearity

    def _step(self) -> Step:
        return plain_step(Tensor.tanh if self.nonlinearity == "tanh" else Tensor.relu)


class _LongShort(_Gates):
    gates, states = 4, 2

    def _step(self) -> Step:
        return long_short_step


class _Gated(_Gates):
    gates = 3

    def _step(self) -> Step:
        return gated_step


# -- one step ------------------------------------------------------------------------------------------
class _Cell(_Gates):
    """A cell with weights for the input and for the hidden state; each has a block of `hidden_size` rows per gate."""

    def __init__(self, input_size: int, hidden_size: int, bias: bool = True) -> None:
        self.hidden_size = hidden_size
        bound, rows = fan_in_bound(hidden_size), self.gates * hidden_size
        self.weight_ih = uniform((rows, input_size), bound)
        self.weight_hh = uniform((rows, hidden_size), bound)
        self.bias_ih = uniform((rows,), bound) if bias else None
        self.bias_hh = uniform((rows,), bound) if bias else None

    def _next(self, x: Tensor, given: State | None) -> State:
        wanted = (*x.shape[:-1], self.hidden_size)
        state = (Tensor.zeros(*wanted, dtype=x.dtype),) * self.states if given is None else given
        if len(state) != self.states or any(s.shape != wanted for s in state):
            raise ShapeError(f"{type(self).__name__} of {x.shape} with a state of {', '.join(str(s.shape) for s in state)}: it must be "
                             f"{wanted}" + (", twice" if self.states > 1 else ""))
        weights = Direction(self.weight_ih, self.weight_hh, self.bias_ih, self.bias_hh)
        return advance(self._step(), x.linear(weights.weight_ih, weights.bias_ih), weights, state)


class RNNCell(_Plain, _Cell):
    """A plain cell: the next state is tanh(W x + U h), or with relu; (…, hidden_size)."""

    def __init__(self, input_size: int, hidden_size: int, bias: bool = True, nonlinearity: str = "tanh") -> None:
        super().__init__(input_size, hidden_size, bias)
        self._choose(nonlinearity)

    def forward(self, x: Tensor, h: Tensor | None = None) -> Tensor:
        return self._next(x, None if h is None else (h,))[0]


class LSTMCell(_LongShort, _Cell):
    """An LSTM cell (Hochreiter and Schmidhuber, 1997): the next hidden and cell state (h, c) from x and the last ones. Gates i, f, g, o."""

    def forward(self, x: Tensor, state: tuple[Tensor, Tensor] | None = None) -> tuple[Tensor, Tensor]:
        h, c = self._next(x, state)
        return h, c


class GRUCell(_Gated, _Cell):
    """A gated recurrent unit (Cho et al., 2014): the next state from x and the last one. Gates r, z, n."""

    def forward(self, x: Tensor, h: Tensor | None = None) -> Tensor:
        return self._next(x, None if h is None else (h,))[0]


# -- sequences -----------------------------------------------------------------------------------------
class _Recurrent(_Gates):
    """Layers of cells over sequences (length, batch, input_size), (batch, length, input_size) with `batch_first`, or (length, input_size).
    `dropout` is not used in inference."""

    def __init__(self, input_size: int, hidden_size: int, num_layers: int = 1, bias: bool = True, batch_first: bool = False,
                 dropout: float = 0.0, bidirectional: bool = False) -> None:
        if num_layers < 1:
            raise ShapeError(f"{type(self).__name__} with {num_layers} layers: give at least one")
        self.hidden_size, self.num_layers, self.batch_first, self.bidirectional = hidden_size, num_layers, batch_first, bidirectional
        bound, rows = fan_in_bound(hidden_size), self.gates * hidden_size
        for layer in range(num_layers):
            for suffix in self._suffixes(layer):
                width = input_size if layer == 0 else hidden_size * (1 + bidirectional)
                setattr(self, f"weight_ih{suffix}", uniform((rows, width), bound))
                setattr(self, f"weight_hh{suffix}", uniform((rows, hidden_size), bound))
                setattr(self, f"bias_ih{suffix}", uniform((rows,), bound) if bias else None)
                setattr(self, f"bias_hh{suffix}", uniform((rows,), bound) if bias else None)

    def _suffixes(self, layer: int) -> list[str]:
        """The suffixes of a layer's parameter names, one per direction, as in PyTorch."""
        return [f"_l{layer}", f"_l{layer}_reverse"][:1 + self.bidirectional]

    def _run(self, x: Tensor, given: State | None) -> tuple[Tensor, State]:
        """The hidden states of the last layer at every step, and the last states of every layer and direction."""
        if x.ndim not in (2, 3) or is_symbolic(x.shape) or 0 in x.shape:
            raise ShapeError(f"{type(self).__name__} of {x.shape}: give sequences (length, features), or with a batch, of known extents")
        batched = x.ndim == 3
        steps = x.unsqueeze(1) if not batched else x.transpose(0, 1) if self.batch_first else x
        count, batch = self.num_layers * (1 + self.bidirectional), steps.shape[1]
        wanted = (count, batch, self.hidden_size) if batched else (count, self.hidden_size)
        start = (Tensor.zeros(*wanted, dtype=x.dtype),) * self.states if given is None else given
        if len(start) != self.states or any(s.shape != wanted for s in start):
            raise ShapeError(f"{type(self).__name__} of {x.shape} with states of {', '.join(str(s.shape) for s in start)}: each is "
                             f"{wanted}, layers and directions first")
        directions = [Direction(*(getattr(self, name + suffix) for name in ("weight_ih", "weight_hh", "bias_ih", "bias_hh")))
                      for layer in range(self.num_layers) for suffix in self._suffixes(layer)]
        states = tuple(s.reshape(count, batch, self.hidden_size) for s in start)
        steps, last = run_layers(self._step(), steps, states, directions, self.bidirectional)
        result = steps.squeeze(1) if not batched else steps.transpose(0, 1) if self.batch_first else steps
        return result, tuple(s.reshape(wanted) for s in last)


class RNN(_Plain, _Recurrent):
    """Layers of `RNNCell` over sequences: (outputs, last hidden state), as in PyTorch."""

    def __init__(self, input_size: int, hidden_size: int, num_layers: int = 1, nonlinearity: str = "tanh", bias: bool = True,
                 batch_first: bool = False, dropout: float = 0.0, bidirectional: bool = False) -> None:
        super().__init__(input_size, hidden_size, num_layers, bias, batch_first, dropout, bidirectional)
        self._choose(nonlinearity)

    def forward(self, x: Tensor, h: Tensor | None = None) -> tuple[Tensor, Tensor]:
        outputs, (last,) = self._run(x, None if h is None else (h,))
        return outputs, last


class GRU(_Gated, _Recurrent):
    """Layers of `GRUCell` over sequences: (outputs, last hidden state), as in PyTorch."""

    def forward(self, x: Tensor, h: Tensor | None = None) -> tuple[Tensor, Tensor]:
        outputs, (last,) = self._run(x, None if h is None else (h,))
        return outputs, last


class LSTM(_LongShort, _Recurrent):
    """Layers of `LSTMCell` over sequences: (outputs, (last hidden state, last cell state)), as in PyTorch."""

    def forward(self, x: Tensor, state: tuple[Tensor, Tensor] | None = None) -> tuple[Tensor, tuple[Tensor, Tensor]]:
        outputs, (h, c) = self._run(x, state)
        return outputs, (h, c)
