"""Several releases of torch: what `make test-matrix` does, and what only newer ones have."""
