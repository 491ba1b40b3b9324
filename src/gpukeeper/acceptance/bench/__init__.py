"""The machine under test: what it is, who else uses its GPUs, and the processes that run probes on it."""
