"""What passes ask about a graph. Nothing here changes one."""
