"""The operations of Tensor, in layers: each file uses only those before it."""
