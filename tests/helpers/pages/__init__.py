"""Pages: the code blocks of the documentation, run; `explain`'s report, in a browser."""
