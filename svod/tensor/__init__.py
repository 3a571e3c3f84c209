"""The lazy Tensor. Operations build the graph of docs/ir.md, section 1; nothing here knows how a graph is run."""
from svod.tensor.tensor import Tensor, where

__all__ = ["Tensor", "where"]
