"""`compile-fsdp check`: find the causes if a training script does not compile whole."""
