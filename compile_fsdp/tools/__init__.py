"""What users run beside the compiler: explain, plan, bench, train."""
