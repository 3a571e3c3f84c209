"""What every part needs of the process and its files, and nothing of tensors."""
