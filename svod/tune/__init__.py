"""Which opts: the search of a model, composed."""
