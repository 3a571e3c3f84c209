"""From a state to LINEAR, the instructions that every backend prints."""
