"""The suite blocks: random blocks of layers against PyTorch eager, and the smallest block with the fault of one that is slow or wrong."""
