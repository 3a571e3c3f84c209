"""The nodes that tensor operations build, and the memory behind them."""
