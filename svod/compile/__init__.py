"""How a kernel becomes machine code and a plan."""
