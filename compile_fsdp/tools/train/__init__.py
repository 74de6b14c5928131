"""The main job: train a byte-level transformer on real text."""
