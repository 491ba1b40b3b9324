"""One rule, one file: NAME, SAYS (one sentence), FOR (shapes), ACTS, and `ask(view, settings, now) -> Answer`. More: declared.py."""
