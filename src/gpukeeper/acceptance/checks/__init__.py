"""One check, one file: what to run, and how to read its answer."""
