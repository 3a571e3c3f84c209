"""LINEAR as LLVM IR, and its object."""
