"""One rule, one file: NAME, SUMMARY, FOR, ACTS and `evaluate(view, settings, now) -> Answer`; more: declared.py."""
