"""Passes on the forward and backward graphs of AOTAutograd's partitioner."""
