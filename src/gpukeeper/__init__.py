"""gpukeeper takes GPUs into service and takes them back. ARCHITECTURE.md has the picture."""

__version__ = "0.1.0"
