"""The NVIDIA driver: one process that calls it (child), one protocol, one set of facts, one client."""
