"""NVIDIA's GPUs: from LINEAR to LLVM IR to PTX to machine code, and the driver that runs it."""
