"""`compile-fsdp calibrate`: measure the costs by which the passes decide."""
