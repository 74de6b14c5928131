"""Shared test helpers, in a folder per subject."""
