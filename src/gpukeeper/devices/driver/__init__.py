"""The NVIDIA driver: one program that calls it (child), one protocol, one set of facts, one client."""
