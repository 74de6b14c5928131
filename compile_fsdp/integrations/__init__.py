"""Compile models that a trainer shards itself; each module supports one trainer and is imported by name."""
