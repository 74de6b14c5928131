"""Train FSDP2 models under torch.compile as one forward and one backward graph."""
