"""Where work runs. The same file names in each: connect, translate (pure), adapter, errors."""
