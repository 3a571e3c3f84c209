"""Canonical forms and kernel keys: the differences between kernels that they ignore and keep, and recorded keys that must not change.

`python -m tests.core.schedule.test_canonical` rewrites golden_keys.json; do that only together with a new AST_VERSION,
or for a kernel whose operation has a new meaning."""
from __future__ import annotations

import itertools
import json
import os
import random
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from svod.core.ir import symbolic as sy
from svod.core.ir.dtype import dtypes
from svod.core.ir.param import Param
from svod.core.ir.uop import COMMUTATIVE, Ops, UOp
from svod.core.schedule.axes import range_lists
from svod.core.schedule.canonical import canonicalize, key_of_canonical
from tests.core.corpus import CORPUS
from tests.draws import a_quarter

GOLDEN = Path(__file__).with_name("golden_keys.json")


def kernel_key(ast: UOp) -> str:
    canonical, _ = canonicalize(ast)
    return key_of_canonical(canonical)


def disguise(ast: UOp, seed: int) -> tuple[UOp, list[int]]:
    """Return the same kernel with other RANGE ids, slots and orders of commutative operands; and the old slot of each new slot."""
    rng = random.Random(seed)
    nodes = ast.toposort()
    ids = [u.arg for u in nodes if u.op is Ops.RANGE]
    renamed = dict(zip(ids, rng.sample(range(500), len(ids)), strict=True))
    slots = sorted(u.arg.slot for u in nodes if u.op is Ops.PARAM)
    shuffled = rng.sample(slots, len(slots))
    done: dict[UOp, UOp] = {}
    for u in nodes:
        node = u.replace(src=tuple(done[s] for s in u.src))
        if u.op is Ops.RANGE:
            node = u.replace(arg=renamed[u.arg])
        elif u.op is Ops.PARAM:
            node = u.replace(arg=replace(u.arg, slot=shuffled.index(u.arg.slot)))
        elif u.op in COMMUTATIVE and u.dtype != dtypes.index and rng.random() < 0.5:
            node = node.replace(src=node.src[::-1])
        done[u] = node
    return done[ast], shuffled


@pytest.mark.parametrize("name", a_quarter(CORPUS))
def test_canonical_form_ignores_names(name: str) -> None:
    ast = CORPUS[name]()
    assert canonicalize(ast) == (ast, tuple(range(len(list(ast.walk(Ops.PARAM))))))
    for seed in range(3):
        other, slots = disguise(ast, seed)
        again, permutation = canonicalize(other)
        assert again is ast
        assert kernel_key(other) == kernel_key(ast)
        assert sorted(permutation) == sorted(slots)
        by_slot = {u.arg.slot: u for u in other.walk(Ops.PARAM)}
        for u in ast.walk(Ops.PARAM):
            assert by_slot[permutation[u.arg.slot]].arg.size == u.arg.size


def test_keys_tell_kernels_apart() -> None:
    keys = [kernel_key(build()) for build in CORPUS.values()]
    assert len(set(keys)) == len(keys)


def tiny(n: int = 8, dtype: str = "float32", scale: float = 2.0, constant: bool = False, op: Ops = Ops.ADD) -> UOp:
    kind = getattr(dtypes, dtype)
    i = sy.make_range(n, 0)
    out, x = (UOp(Ops.PARAM, kind, (), Param(s, n, constant and s == 1)) for s in range(2))
    value = UOp(Ops.LOAD, kind, (UOp(Ops.INDEX, kind, (x, i)),)).alu(op, UOp.const(kind, scale))
    return UOp(Ops.SINK, dtypes.void, (UOp(Ops.STORE, dtypes.void, (UOp(Ops.INDEX, kind, (out, i)), value, i)),))


def test_what_a_key_depends_on() -> None:
    variants = [tiny(), tiny(n=9), tiny(dtype="float16"), tiny(scale=3.0), tiny(scale=-0.0), tiny(scale=0.0), tiny(constant=True),
                tiny(op=Ops.MUL), tiny(op=Ops.SUB)]
    for a, b in itertools.combinations(variants, 2):
        assert kernel_key(a) != kernel_key(b)


def test_ranges_and_slots_are_numbered_from_zero() -> None:
    for build in CORPUS.values():
        ast = build()
        ids = [r.arg for u in ast.toposort() for r in range_lists(u)]
        assert sorted(set(ids)) == list(range(len(set(ids))))
        assert ast.src[0].src[0].src[0].arg.slot == 0


def current_keys() -> dict[str, str]:
    return {name: kernel_key(build()) for name, build in sorted(CORPUS.items())}


def test_golden_keys() -> None:
    golden = json.loads(GOLDEN.read_text())
    assert len(golden) >= 30
    found = current_keys()
    assert {name: found.get(name) for name in golden} == golden, "kernel keys changed: stored tuning results would be lost"


@pytest.mark.slow
@pytest.mark.parametrize("hash_seed", ["0", "4711"])
def test_keys_are_equal_in_other_processes(hash_seed: str) -> None:
    code = "import json; from tests.core.schedule.test_canonical import current_keys; print(json.dumps(current_keys()))"
    root = Path(__file__).parents[3]
    out = subprocess.run([sys.executable, "-c", code], env={**os.environ, "PYTHONHASHSEED": hash_seed}, cwd=root, capture_output=True,
                         text=True, check=True).stdout
    assert json.loads(out) == current_keys()


if __name__ == "__main__":
    GOLDEN.write_text(json.dumps(current_keys(), indent=1) + "\n")
