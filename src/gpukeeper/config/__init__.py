"""The policy file → model values: strict, every problem at once, and where each value came from."""
