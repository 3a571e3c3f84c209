"""`python -m svod.cli.tune` is `svod-tune`."""
from svod.cli.tune import main

main()
