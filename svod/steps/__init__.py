"""Shows the steps from a graph to machine code: the result of each pass, and the changes since the previous one."""
