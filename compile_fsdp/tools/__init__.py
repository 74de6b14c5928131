"""Tools for users beside the compiler: explain, plan, bench, train."""
