"""Measure the costs of this machine's collectives, copies and matmuls once, and store them."""
