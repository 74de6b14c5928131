"""`compile-fsdp check`: whether a training script compiles whole, and what to change where it does not."""
