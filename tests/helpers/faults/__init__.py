"""Ranks that are killed at a planned moment, of a training job or of a save."""
