"""Families of kernels with the same structure and other extents. A chain of one kernel is worth trying for the whole family, as chains name
axes and not positions.

    family_key(gemm 512×512×512) == family_key(gemm 128×768×3072) != family_key(gemm with a bias)

The key leaves out everything that depends on an extent: integer constants in index expressions, bounds of variables, sizes of buffers. It
includes dtypes, operations, their operands, which buffers are weights, and all other constants.
"""
from __future__ import annotations

import hashlib

from svod.core.ir.dtype import dtypes
from svod.core.ir.param import Param
from svod.core.ir.uop import Ops, UOp


def family_key(ast: UOp) -> str:
    """32 hex digits, equal for ASTs that differ in extents alone. Deterministic across processes."""
    key: str = ast.cached("family", _made_key)
    return key


def _made_key(ast: UOp) -> str:
    digests: dict[UOp, bytes] = {}
    for u in ast.toposort():
        arg: object = u.arg
        if u.op is Ops.CONST and u.dtype is dtypes.index:
            arg = "n"
        elif u.op is Ops.DEFINE_VAR:
            arg = u.arg[0]
        elif isinstance(arg, Param):
            arg = (arg.slot, arg.constant)
        # digests depend on operands, not on which nodes are shared: with equal extents, index expressions become one node
        text = f"svod-family-2 {u.op.value} {u.dtype.name} {arg!r}".encode()
        digests[u] = hashlib.blake2b(b" ".join([text, *(digests[s] for s in u.src)]), digest_size=16).digest()
    return digests[ast].hex()
