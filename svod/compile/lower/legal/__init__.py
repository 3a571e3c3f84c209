"""Instructions that a renderer does not print, made of those that it does."""
