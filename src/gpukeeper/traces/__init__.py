"""Sources of recorded work for a backtest: one source, one file; each gives a `Trace` (model/series.py).

They read and never decide. A minute of which a source has no row is not measured, never zero."""
