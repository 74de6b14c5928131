"""`compile-fsdp bench`: compare a training step with other ways to run FSDP2."""
