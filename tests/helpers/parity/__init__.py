"""Compare training under the backend with torch's eager FSDP2."""
