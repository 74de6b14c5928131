"""Trainers that shard by themselves: compile what they have sharded. A file for each, imported by its name."""
