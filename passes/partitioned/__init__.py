"""Passes on the two halves that AOTAutograd's partitioner makes of a joint graph."""
