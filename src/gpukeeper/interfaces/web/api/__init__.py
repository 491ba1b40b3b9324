"""The HTTP API under /api/v1: the values of --json, with the rights of the caller."""
