"""The HTML and Markdown report of a run."""
