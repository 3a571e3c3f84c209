"""The suite blocks: random blocks of layers against PyTorch eager, and the smallest block that shows what was found."""
