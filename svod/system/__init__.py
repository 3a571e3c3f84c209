"""Helpers for processes, files and text that every part uses. They know nothing of tensors."""
