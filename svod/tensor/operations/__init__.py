"""The operations of Tensor in layers: a file uses only operations of the layers below (`svod.tensor.base` lists them)."""
