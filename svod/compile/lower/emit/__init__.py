"""Emission of the LINEAR of each phase from the stages of a state, by objects that build on one another."""
