"""From the stages of a state to the LINEAR of its phases, by objects that hold one another: each knows those before it."""
