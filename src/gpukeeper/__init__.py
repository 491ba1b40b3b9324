"""gpukeeper takes GPUs into service and takes them back. ARCHITECTURE.md has the picture."""


def __getattr__(name: str) -> str:
    """`__version__`, when it is asked for: most commands do not need it, and reading it takes a while."""
    if name != "__version__":
        raise AttributeError(f"module 'gpukeeper' has no attribute {name!r}")
    from importlib import metadata

    try:
        return metadata.version("gpukeeper")
    except metadata.PackageNotFoundError:  # run from a directory that was never installed
        return "0.0.0+unknown"
