"""`compile-fsdp bench`: compare the training step of several ways to run FSDP2."""
