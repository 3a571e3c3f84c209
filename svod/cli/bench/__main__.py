"""`python -m svod.cli.bench` is `svod-bench`."""
from svod.cli.bench import main

main()
