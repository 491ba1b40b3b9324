"""Reads what the rules of fleet/preflight judge. Read-only, except for the trial."""
