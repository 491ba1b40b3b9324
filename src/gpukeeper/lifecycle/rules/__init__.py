"""One rule, one file: how it is evaluated, and the value RULE."""
