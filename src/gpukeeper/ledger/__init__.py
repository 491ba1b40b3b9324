"""Journal, state and signals: what happened, what follows from it, what was measured. Always local."""
