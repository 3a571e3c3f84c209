"""Values in the memory that the threads of a group share: how they copy them, and how far apart rows lie."""
