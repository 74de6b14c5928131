"""How a budget of memory is spent: what a step needs over time, and what is kept, gathered again or recomputed."""
