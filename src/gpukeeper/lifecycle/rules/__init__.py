"""One rule, one file: NAME, SUMMARY, FOR, ACTS and `ask(view, settings, now) -> Answer`; more: declared.py."""
