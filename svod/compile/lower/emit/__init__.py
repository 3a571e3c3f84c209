"""Emission of the LINEAR of phases from the stages of a state, by objects that hold one another: each knows those before it."""
