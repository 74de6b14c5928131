"""Replay a traced step, in its process or from a file."""
