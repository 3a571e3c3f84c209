"""The threads of a group: what each computes and copies, and the memory that they share."""
