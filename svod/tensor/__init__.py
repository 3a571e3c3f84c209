"""The lazy Tensor. Operations build the graph of docs/ir.md, section 1; this package does not know how a graph is run."""
from svod.tensor.tensor import Tensor, where

__all__ = ["Tensor", "where"]
