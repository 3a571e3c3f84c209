"""The steps from a graph to machine code, for people: what each pass made, and what changed since the one before."""
