"""Directory trees: size, age, use; and how one is removed without touching anything else."""
