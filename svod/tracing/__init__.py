"""`svod.jit` captures a function of tensors once per input signature. Each later run is one native call (docs/jit.md).

    f = svod.jit(model)
    y = f(x)            # first call with this shape and dtype: the graph is captured and prepared
    y = f(x2)           # later calls patch the addresses and run the plan

    call: arguments → key, arrays → Captured of the key → addresses, launches → tensors over fresh memory

A call whose signature was captured before builds no graph. Values that the function reads besides its arguments are watched (`watch`): if
one changes, the next call captures the function again.
"""
from svod.tracing.jitted import Jit, jit

__all__ = ["Jit", "jit"]
