"""gpukeeper on many servers: what is wanted, what was seen, the plan (pure), and its execution over ssh."""
