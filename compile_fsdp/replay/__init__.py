"""Run a step that was traced once again without tracing: in the same process, and from a file in the next one."""
