"""`make mutate`: disable each precondition of the passes in turn."""
