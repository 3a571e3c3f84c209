"""svod's version of each ATen operation: functions of svod tensors, by the name of the overload.

    TABLE["aten.addmm.default"].function(bias, a, b)  →  bias + a @ b
"""
from __future__ import annotations

from svod.torch.operations import (
                                   attention,
                                   complex_numbers,
                                   convolutions,
                                   creation,
                                   elementwise,
                                   indexing,
                                   norms,
                                   pooling,
                                   products,
                                   recurrent,
                                   reductions,
                                   scatter,
                                   searching,
                                   views,
)
from svod.torch.operations.complex_numbers import COMPLEX
from svod.torch.operations.table import TABLE, Operation

__all__ = ["COMPLEX", "TABLE", "Operation", "attention", "complex_numbers", "convolutions", "creation", "elementwise", "indexing", "norms",
           "pooling", "products", "recurrent", "reductions", "scatter", "searching", "views"]
