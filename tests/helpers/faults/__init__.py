"""Kill ranks at a planned moment of a training job or of a save."""
