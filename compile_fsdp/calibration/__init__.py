"""What this machine's collectives, copies and products of matrices cost, measured once and kept."""
