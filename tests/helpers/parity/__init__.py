"""Training under the backend beside torch's eager FSDP2, the features to do it with, and the table of outcomes."""
