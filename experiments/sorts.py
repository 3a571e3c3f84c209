"""Sorts, sorted positions and the k largest against NumPy, PyTorch and JAX; SciPy has none. Milliseconds, medians of interleaved runs.

    python experiments/sorts.py [--seconds 1] [NAME …]

NAME is a part of the names of cases, such as `argsort`, `int64` or `2^20`. svod's sorts are stable, so the others' are as well; NumPy's and
PyTorch's that are not, which may be faster, are columns of their own. Of the k largest NumPy has no single function: its nearest is a
partition, of which the k are sorted. NumPy has no bfloat16. Results that differ from NumPy's are named.
"""
from __future__ import annotations

import argparse
from typing import Any, NamedTuple

import numpy as np
from beside_libraries import Array, Contestant, chosen, header, library, line, of_function, of_plan, race

# isort: split
from svod import Tensor


class Case(NamedTuple):
    """`operation`: sort, argsort or topk, along the last axis; `k`: of topk."""

    operation: str
    dtype: str
    shape: tuple[int, int]
    k: int = 0


SHAPES = {"1 row of 2^20": (1, 1 << 20), "1 row of 2^16": (1, 1 << 16), "1024 rows of 1000": (1024, 1000), "64 rows of 16384": (64, 16384),
          "100000 rows of 16": (100_000, 16)}
LARGEST = {"50 of 50257, 32 rows": ((32, 50257), 50), "5 of 1000, 4096 rows": ((4096, 1000), 5)}
DTYPES = ("int32", "int64", "float32", "float64", "bfloat16")
CASES = {**{f"{operation} {dtype}, {size}": Case(operation, dtype, shape)
            for operation in ("sort", "argsort") for dtype in DTYPES for size, shape in SHAPES.items()},
         **{f"topk {dtype}, {size}": Case("topk", dtype, shape, k) for dtype in ("int64", "float32", "bfloat16")
            for size, (shape, k) in LARGEST.items()}}
PEERS = ("numpy", "torch", "jax")
UNSTABLE = ("numpy*", "torch*")


def operand(case: Case, rng: np.random.Generator) -> Array:
    """Random numbers; those of bfloat16 as float32 that bfloat16 has exactly, of which many are equal."""
    if case.dtype.startswith("int"):
        limits = np.iinfo(case.dtype)
        return rng.integers(limits.min, limits.max, case.shape, case.dtype, endpoint=True)
    x = rng.standard_normal(case.shape)
    if case.dtype != "bfloat16":
        return x.astype(case.dtype)
    return np.asarray((x.astype(np.float32).view(np.uint32) & 0xFFFF0000).view(np.float32))


def expected(case: Case, x: Array) -> Array:
    if case.operation == "topk":
        return np.asarray(np.sort(x, -1)[:, ::-1][:, :case.k])
    return np.argsort(x, -1, kind="stable") if case.operation == "argsort" else np.sort(x, -1)


def svod_run(case: Case, x: Array) -> Contestant:
    given = Tensor(x).cast(case.dtype).realize()
    if case.operation == "topk":
        values, positions = given.topk(case.k)
        return of_plan(Tensor.prepare_batch([values, positions]), lambda out: np.take_along_axis(x, out[1].reshape(-1, case.k), -1))
    made = given.argsort() if case.operation == "argsort" else given.sort().values
    return of_plan(made.prepare(), lambda out: _wide(out[0], case.dtype).reshape(case.shape))


def _wide(a: Array, dtype: str) -> Array:
    """The values of an output of svod's; NumPy has no bfloat16, whose bits are a float32's upper half."""
    bits = dtype == "bfloat16" and a.dtype == np.uint16
    return np.asarray((a.astype(np.uint32) << 16).view(np.float32) if bits else a)


def numpy_runs(case: Case, x: Array) -> dict[str, Contestant]:
    def largest() -> Array:
        at = np.argpartition(x, -case.k, -1)[:, -case.k:]
        found = np.take_along_axis(x, at, -1)
        return np.take_along_axis(at, np.argsort(found, -1)[:, ::-1], -1)

    def values() -> Array:
        np.copyto(kept, x)
        kept.sort(-1)
        return kept
    if case.dtype == "bfloat16":
        return {}
    if case.operation == "topk":
        return {"numpy": of_function(largest, lambda at: np.take_along_axis(x, at, -1))}
    if case.operation == "sort":
        kept = np.empty_like(x)
        return {"numpy": of_function(values)}
    return {"numpy": of_function(lambda: np.argsort(x, -1, kind="stable")), "numpy*": of_function(lambda: np.argsort(x, -1))}


def torch_runs(case: Case, x: Array, torch: Any) -> dict[str, Contestant]:
    given = torch.from_numpy(x).to(getattr(torch, case.dtype))
    if case.operation == "topk":
        best = torch.topk(given, case.k)
        return {"torch": of_function(lambda: torch.topk(given, case.k, out=best),
                                     lambda found: np.take_along_axis(x, found.indices.numpy(), -1))}

    def sorts(stable: bool) -> Contestant:
        kept = torch.sort(given)
        if case.operation == "argsort":
            return of_function(lambda: torch.sort(given, stable=stable, out=kept).indices)
        return of_function(lambda: torch.sort(given, stable=stable, out=kept).values,
                           lambda found: (found.float() if case.dtype == "bfloat16" else found).numpy())
    return {"torch": sorts(True), "torch*": sorts(False)} if case.operation == "argsort" else {"torch": sorts(False)}


def jax_run(case: Case, x: Array, jax: Any) -> Contestant:
    jnp = jax.numpy
    jax.config.update("jax_enable_x64", True)
    operations = {"sort": jnp.sort, "argsort": jnp.argsort, "topk": lambda v: jax.lax.top_k(v, case.k)}
    value, compiled = jnp.asarray(x, case.dtype), jax.jit(operations[case.operation])
    return of_function(lambda: jax.block_until_ready(compiled(value)),
                       lambda found: np.take_along_axis(x, np.asarray(found[1]), -1) if case.operation == "topk"
                       else np.asarray(found.astype(x.dtype) if case.operation == "sort" else found))


def contestants(case: Case, x: Array) -> dict[str, Contestant]:
    """The libraries that are installed; svod's is the last, behind libraries that rest."""
    torch, jax = library("torch"), library("jax")
    return {**({"jax": jax_run(case, x, jax)} if jax else {}), **(torch_runs(case, x, torch) if torch else {}),
            **numpy_runs(case, x), "svod": svod_run(case, x)}


def wrong(case: Case, x: Array, runs: dict[str, Contestant]) -> list[str]:
    """The contestants whose result differs. Of positions that are not stable the values count."""
    want, found = expected(case, x), {name: c.result() for name, c in runs.items()}
    ordered = {name: np.take_along_axis(x, result, -1) for name, result in found.items() if name in UNSTABLE}
    return [name for name, result in found.items()
            if not (np.array_equal(ordered[name], np.sort(x, -1)) if name in ordered else np.array_equal(result, want))]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", help="parts of the names of cases")
    parser.add_argument("--seconds", type=float, default=1.0, help="for each case")
    options = parser.parse_args()
    rng = np.random.default_rng(0)
    print(header("(*: not stable)", (*PEERS, *UNSTABLE)))
    for name in chosen(CASES, options.names):
        x = operand(CASES[name], rng)
        runs = contestants(CASES[name], x)
        differing = wrong(CASES[name], x, runs)
        times = race({who: c.run for who, c in runs.items()}, options.seconds)
        print(line(name, times, (*PEERS, *UNSTABLE)) + "".join(f"   {who} differs" for who in differing), flush=True)


if __name__ == "__main__":
    main()
