"""Several torch releases: `make test-matrix`, and the differences between releases."""
