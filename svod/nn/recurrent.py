"""One step of a recurrent network."""
from __future__ import annotations

from svod.errors import ShapeError
from svod.nn.module import Module, fan_in_bound, uniform
from svod.tensor import Tensor


class _Cell(Module):
    """Weights of the input and of the hidden state, one block of `hidden_size` rows for each gate."""

    gates = 1

    def __init__(self, input_size: int, hidden_size: int, bias: bool = True) -> None:
        self.hidden_size = hidden_size
        bound, rows = fan_in_bound(hidden_size), self.gates * hidden_size
        self.weight_ih = uniform((rows, input_size), bound)
        self.weight_hh = uniform((rows, hidden_size), bound)
        self.bias_ih = uniform((rows,), bound) if bias else None
        self.bias_hh = uniform((rows,), bound) if bias else None

    def _products(self, x: Tensor, h: Tensor | None) -> tuple[Tensor, Tensor, Tensor]:
        state = Tensor.zeros(*x.shape[:-1], self.hidden_size, dtype=x.dtype) if h is None else h
        if state.shape != (*x.shape[:-1], self.hidden_size):
            raise ShapeError(f"{type(self).__name__} of {x.shape} with a state of {state.shape}: it must be "
                             f"{(*x.shape[:-1], self.hidden_size)}")
        return x.linear(self.weight_ih, self.bias_ih), state.linear(self.weight_hh, self.bias_hh), state


class RNNCell(_Cell):
    """tanh(W x + U h): the next state (…, hidden_size)."""

    def forward(self, x: Tensor, h: Tensor | None = None) -> Tensor:
        a, b, _ = self._products(x, h)
        return a.add(b).tanh()


class LSTMCell(_Cell):
    """(h, c), the next hidden and cell state (Hochreiter and Schmidhuber, 1997), from x and the last ones; gates i, f, g, o."""

    gates = 4

    def forward(self, x: Tensor, state: tuple[Tensor, Tensor] | None = None) -> tuple[Tensor, Tensor]:
        a, b, h = self._products(x, None if state is None else state[0])
        c = h.zeros_like() if state is None else state[1]
        i, f, g, o = a.add(b).chunk(4, -1)
        cell = f.sigmoid().mul(c).add(i.sigmoid().mul(g.tanh()))
        return o.sigmoid().mul(cell.tanh()), cell


class GRUCell(_Cell):
    """The next state of a gated recurrent unit (Cho et al., 2014); gates r, z, n."""

    gates = 3

    def forward(self, x: Tensor, h: Tensor | None = None) -> Tensor:
        a, b, state = self._products(x, h)
        (ar, az, an), (br, bz, bn) = a.chunk(3, -1), b.chunk(3, -1)
        r, z = ar.add(br).sigmoid(), az.add(bz).sigmoid()
        n = an.add(r.mul(bn)).tanh()
        return n.add(z.mul(state.sub(n)))
