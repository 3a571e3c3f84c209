"""Families of kernels: same structure, other extents. A relative's chain is worth trying, as chains name axes and not positions.

    family_key(gemm 512×512×512) == family_key(gemm 128×768×3072) != family_key(gemm with a bias)

Everything that depends on an extent is left out: integer constants of index expressions, bounds of variables, sizes of buffers.
Dtypes, operations, their wiring, which buffers are weights, and the other constants stay.
"""
from __future__ import annotations

import hashlib

from svod.core.ir.dtype import dtypes
from svod.core.ir.param import Param
from svod.core.ir.uop import Ops, UOp


def family_key(ast: UOp) -> str:
    """32 hex digits, equal for ASTs that differ in extents alone. Deterministic across processes."""
    digests: dict[UOp, bytes] = {}
    for u in ast.toposort():
        arg: object = u.arg
        if u.op is Ops.CONST and u.dtype is dtypes.index:
            arg = "n"
        elif u.op is Ops.DEFINE_VAR:
            arg = u.arg[0]
        elif isinstance(arg, Param):
            arg = (arg.slot, arg.constant)
        # The content of the operands counts, not which nodes are shared: equal extents make equal index expressions one node
        text = f"svod-family-2 {u.op.value} {u.dtype.name} {arg!r}".encode()
        digests[u] = hashlib.blake2b(b" ".join([text, *(digests[s] for s in u.src)]), digest_size=16).digest()
    return digests[ast].hex()
