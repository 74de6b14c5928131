"""`compile-fsdp bench`: a training step against the other ways to run FSDP2."""
