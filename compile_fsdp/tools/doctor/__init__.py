"""`compile-fsdp doctor`: find faults of an installation, with a remedy for each."""
