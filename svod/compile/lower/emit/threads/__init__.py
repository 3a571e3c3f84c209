"""Emission for the threads of a group: the part of the work that each computes and copies, and the memory that they share."""
