"""The machine under test: its facts, other users of its GPUs, and the processes that run probes on it."""
