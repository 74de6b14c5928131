"""The traceable FSDP2 runtime: torch's own state and hooks in eager mode, graph ops while Dynamo traces."""
