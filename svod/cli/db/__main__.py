"""`python -m svod.cli.db` is `svod-db`."""
from svod.cli.db import main

main()
