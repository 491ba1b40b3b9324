"""Checks before an acceptance run: what an engine announces, and what would prevent the run. Pure: rules over facts."""
