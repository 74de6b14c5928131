"""Run the documentation's code blocks, and open `explain`'s report in a browser."""
