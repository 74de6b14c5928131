"""A device that any machine has: memory of its own, streams, events, and collectives that do not stop the host."""
