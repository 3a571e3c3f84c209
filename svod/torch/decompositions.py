"""The ATen operations that PyTorch decomposes before svod gets the graph."""
from __future__ import annotations

from typing import Any

from torch._decomp import core_aten_decompositions

from svod.torch.operations import COMPLEX, TABLE
from svod.torch.whole import RECURRENT


def decompositions() -> dict[Any, Any]:
    """The decompositions for AOT autograd: PyTorch's into core ATen operations, without those of operations in svod's tables, and of
    recurrent layers into svod's own operators. Operations that are not decomposed keep graphs small, and svod's implementations fuse."""
    own = TABLE.keys() | COMPLEX.keys()
    return {operation: apart for operation, apart in core_aten_decompositions().items() if str(operation) not in own} | RECURRENT
