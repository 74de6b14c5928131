"""Memory budget: a step's bytes over time, and choices that free bytes."""
