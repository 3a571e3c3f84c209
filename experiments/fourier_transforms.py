"""Fourier transforms in float32 against NumPy, SciPy, PyTorch and JAX. Milliseconds, medians of interleaved runs.

    python experiments/fourier_transforms.py [--seconds 4] [NAME …]

NAME is a part of the names of cases. PyTorch and NumPy write into arrays that are there, as svod does, SciPy has as many workers as svod
has threads, JAX's functions are compiled. A result that differs from NumPy's in float64 by more than ERROR is named.
"""
from __future__ import annotations

import argparse
from functools import partial
from typing import Any, NamedTuple

import numpy as np
from beside_libraries import Array, Contestant, chosen, header, library, line, of_function, of_plan, race

# isort: split
import svod
from svod import Tensor
from svod.compile.cpu.host import host_target


class Case(NamedTuple):
    """`transform`: its name in all of the libraries; `shape`: of its input, or of the real numbers that a transform back gives."""

    transform: str
    shape: tuple[int, ...]

    @property
    def backwards(self) -> bool:
        return self.transform.startswith("i")


SIZES = {"64 rows of 4096": ("fft", (64, 4096)), "512 × 512": ("fft2", (512, 512)), "1 row of 1000": ("fft", (1, 1000)),
         "64 rows of 1000": ("fft", (64, 1000)), "1 row of 2^20": ("fft", (1, 1 << 20))}
CASES = {f"{kind}{transform}, {size}": Case(kind + transform, shape) for size, (transform, shape) in SIZES.items()
         for kind in ("r", "", "ir")}
PEERS = ("numpy", "scipy", "torch", "jax")
ERROR = 1e-5        # most difference to float64, as a share of the largest result


def operand(case: Case, rng: np.random.Generator) -> Array:
    """Random numbers that the transform takes, real or complex; those of a transform back to real numbers are a real input's."""
    x = rng.standard_normal(case.shape)
    if case.backwards:
        x = getattr(np.fft, case.transform[1:])(x)
    elif not case.transform.startswith("r"):
        x = x + 1j * rng.standard_normal(case.shape)
    return x.astype(np.complex64 if np.iscomplexobj(x) else np.float32)


def exact(case: Case, x: Array) -> Array:
    """NumPy's result in float64."""
    wide = x.astype(np.complex128 if np.iscomplexobj(x) else np.float64)
    return np.asarray(getattr(np.fft, case.transform)(wide, **length(case)))


def length(case: Case) -> dict[str, Any]:
    """The arguments that tell a transform back whether its last axis has an even or an odd number of positions."""
    if not case.backwards:
        return {}
    return {"s": case.shape} if case.transform.endswith("2") else {"n": case.shape[-1]}


def svod_run(case: Case, x: Array) -> Contestant:
    given = Tensor(x.view(np.float32).reshape(*x.shape, 2) if np.iscomplexobj(x) else x).realize()
    made = getattr(svod.fft, case.transform)(given, **length(case))

    def shown(outputs: Any) -> Array:
        out: Array = outputs[0].reshape(made.shape)
        return out if case.backwards else out[..., 0] + 1j * out[..., 1]
    return of_plan(made.prepare(), shown)


def contestants(case: Case, x: Array) -> dict[str, Contestant]:
    """The libraries that are installed, each with the run of its own transform; svod's is the last, behind libraries that rest."""
    runs = {}
    if jax := library("jax"):
        compiled, value = jax.jit(partial(getattr(jax.numpy.fft, case.transform), **length(case))), jax.numpy.asarray(x)
        runs["jax"] = of_function(lambda: jax.block_until_ready(compiled(value)))
    if torch := library("torch"):
        tensor, transform = torch.from_numpy(x), getattr(torch.fft, case.transform)
        out = transform(tensor, **length(case))
        runs["torch"] = of_function(lambda: transform(tensor, **length(case), out=out))
    if library("scipy"):
        from scipy import fft
        runs["scipy"] = of_function(lambda: getattr(fft, case.transform)(x, **length(case), workers=host_target().threads))
    function = getattr(np.fft, case.transform)
    kept = function(x, **length(case))
    runs["numpy"] = of_function(lambda: function(x, **length(case), out=kept))
    return {**runs, "svod": svod_run(case, x)}


def wrong(case: Case, x: Array, runs: dict[str, Contestant]) -> dict[str, float]:
    """The contestants whose error is above ERROR, with their error."""
    want = exact(case, x)
    errors = {name: float(np.abs(c.result().reshape(want.shape) - want).max() / np.abs(want).max()) for name, c in runs.items()}
    return {name: error for name, error in errors.items() if not error <= ERROR}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", help="parts of the names of cases")
    parser.add_argument("--seconds", type=float, default=4.0, help="for each case")
    options = parser.parse_args()
    rng = np.random.default_rng(0)
    print(header("", PEERS))
    for name in chosen(CASES, options.names):
        x = operand(CASES[name], rng)
        runs = contestants(CASES[name], x)
        differing = wrong(CASES[name], x, runs)
        times = race({who: c.run for who, c in runs.items()}, options.seconds)
        remark = "".join(f"   {who} is wrong by {error:.1e}" for who, error in differing.items())
        print(line(name, times, PEERS) + remark, flush=True)


if __name__ == "__main__":
    main()
