"""Trees of files: how large, how old, in use or not. Looks only."""
