"""From LINEAR to LLVM IR to an object."""
