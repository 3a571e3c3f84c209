"""The HTML and Markdown report of benchmark runs and searches."""
