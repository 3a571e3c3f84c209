"""Every operation in PyTorch's own table of tests (OpInfo), run by svod and by PyTorch: which agree, which PyTorch runs, which are wrong.

    python -m experiments.torch_operations [--samples 3] [--seconds 600] [--only NAME] [--dtype float32]

Each sample is a module of one operation, through svod.torch.compile. It needs the package expecttest. The exit status is 1 if a number is
wrong.
"""
from __future__ import annotations

import argparse
import contextlib
import itertools
import logging
import sys
import time
import warnings
from collections import Counter
from typing import Any

import torch
from torch.testing._internal.common_methods_invocations import op_db

import svod.torch
from svod.errors import SvodError

RANDOM = ("rand", "dropout", "bernoulli", "multinomial", "normal", "poisson", "uniform", "exponential", "cauchy", "geometric", "empty",
          "rrelu")


class One(torch.nn.Module):
    """One operation: its tensors are inputs, all else is a constant."""

    def __init__(self, operation: Any, leaves: list[Any], form: Any) -> None:
        super().__init__()
        self.operation, self.leaves, self.form = operation, leaves, form

    def forward(self, *tensors: Any) -> Any:
        given = iter(tensors)
        leaves = [next(given) if isinstance(leaf, torch.Tensor) else leaf for leaf in self.leaves]
        args, kwargs = torch.utils._pytree.tree_unflatten(leaves, self.form)
        return self.operation(*args, **kwargs)


def outcome(operation: Any, sample: Any) -> str:
    """The outcome of a sample: agrees, in PyTorch, not exported, or wrong and by how much."""
    leaves, form = torch.utils._pytree.tree_flatten(((sample.input, *sample.args), sample.kwargs))
    tensors = [t for t in leaves if isinstance(t, torch.Tensor)]
    module = One(operation, leaves, form)
    try:
        expected = module(*tensors)
    except Exception:       # PyTorch does not take its own sample
        return "no sample"
    try:
        run = svod.torch.compile(module, *tensors)
        got = run(*tensors)
    except SvodError as error:
        return f"not exported: {str(error).splitlines()[0][-80:]}"
    try:
        torch.testing.assert_close(got, expected, rtol=1e-3, atol=1e-4, equal_nan=True, check_stride=False)
    except (AssertionError, RuntimeError) as error:
        return "wrong: " + str(error).replace("\n", " ")[:160]
    return "in PyTorch" if run.function.missing or run.function.refused else "agrees"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--samples", type=int, default=3)
    parser.add_argument("--seconds", type=float, default=600)
    parser.add_argument("--only", default="")
    parser.add_argument("--dtype", default="float32")
    given = parser.parse_args()
    logging.getLogger("svod").setLevel(logging.CRITICAL)
    warnings.simplefilter("ignore")
    torch.set_grad_enabled(False)
    dtype = getattr(torch, given.dtype)
    counts: Counter[str] = Counter()
    end = time.monotonic() + given.seconds
    for op in op_db:
        if given.only not in op.name or any(r in op.name for r in RANDOM) or not op.supports_dtype(dtype, "cpu"):
            continue
        if time.monotonic() > end:
            print(f"out of time at {op.name}")
            break
        with contextlib.suppress(NotImplementedError):
            for sample in itertools.islice(op.sample_inputs("cpu", dtype), given.samples):
                result = outcome(op.op, sample)
                counts[result.partition(":")[0]] += 1
                if result.startswith("wrong"):
                    print(f"{op.name}: {result}", flush=True)
    print(", ".join(f"{n} {what}" for what, n in counts.most_common()))
    return 1 if counts["wrong"] else 0


if __name__ == "__main__":
    sys.exit(main())
