"""Trees of files: how large, how old, in use or not; and how one is removed without touching anything else."""
