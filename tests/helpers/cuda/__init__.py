"""A stand-in for an H100, for which torch compiles on a machine without a GPU."""
