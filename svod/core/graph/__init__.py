"""What tensor operations build: nodes, and the memory behind them."""
