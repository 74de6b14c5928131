"""Tools for users of the compiler, one module or folder per command."""
