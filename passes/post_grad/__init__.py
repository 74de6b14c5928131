"""Passes over functional graphs, where Inductor runs its post-grad passes."""
