"""Build, draw, capture, run and print graphs for the passes."""
