"""Recurrent layers over sequences, kept whole by `svod/torch/whole.py`."""
from __future__ import annotations

import functools
from collections.abc import Sequence

from svod.core.ir.variable import is_symbolic
from svod.errors import UnsupportedError
from svod.nn.recurrent import Direction, Step, gated_step, long_short_step, plain_step, run_layers
from svod.tensor import Tensor
from svod.torch.operations.table import own


def layers(step: Step, x: Tensor, states: Tensor | Sequence[Tensor], params: Sequence[Tensor], has_biases: bool, num_layers: int,
           dropout: float, train: bool, bidirectional: bool, batch_first: bool) -> tuple[Tensor, ...]:
    """The outputs of all steps, and the last states. `params` has for each layer and direction the weights, their biases if there are any,
    and the projection of an LSTM that has one."""
    if train and dropout and num_layers > 1:
        raise UnsupportedError("it drops elements at random")
    steps = x.transpose(0, 1) if batch_first else x
    if is_symbolic(steps.shape[:1]):
        raise UnsupportedError("the steps of a sequence are unrolled, which needs their number")
    each = len(params) // (num_layers * (1 + bidirectional))
    directions = [Direction(*w[:2], *(w[2:4] if has_biases else (None, None)), *w[2 + 2 * has_biases:])
                  for i in range(0, len(params), each) for w in [params[i:i + each]]]
    start = (states,) if isinstance(states, Tensor) else tuple(states)
    outputs, last = run_layers(step, steps, start, directions, bidirectional)
    return outputs.transpose(0, 1) if batch_first else outputs, *last


for _name, _step in {"lstm": long_short_step, "gru": gated_step, "rnn_tanh": plain_step(Tensor.tanh),
                     "rnn_relu": plain_step(Tensor.relu)}.items():
    own(_name, widens=False)(functools.partial(layers, _step))
