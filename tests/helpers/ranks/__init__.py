"""Ranks for tests: processes, threads, a fake world, torchrun, two hosts."""
