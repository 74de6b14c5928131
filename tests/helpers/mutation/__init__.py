"""What `make mutate` does: the preconditions of the passes, each disabled in turn."""
