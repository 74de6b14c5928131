"""Ranks for tests: pools of processes, a fake world, torchrun."""
