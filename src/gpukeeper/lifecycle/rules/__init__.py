"""One rule, one file: NAME, what it asks for in words, and `ask(view, settings, now) -> Answer`."""
