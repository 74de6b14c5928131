"""`compile-fsdp plan`: memory and time of a compiled step under several settings, before anything runs."""
