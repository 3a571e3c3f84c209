"""The ATen operations that PyTorch decomposes before svod gets the graph."""
from __future__ import annotations

from typing import Any

from torch._decomp import core_aten_decompositions

from svod.torch.operations import COMPLEX, TABLE
from svod.torch.whole import RECURRENT


def decompositions() -> dict[Any, Any]:
    """PyTorch's decompositions into core ATen operations, except for operations in svod's tables, and into svod's own operators: this
    keeps graphs small, and svod's implementations fuse."""
    own = TABLE.keys() | COMPLEX.keys()
    return {operation: apart for operation, apart in core_aten_decompositions().items() if str(operation) not in own} | RECURRENT
