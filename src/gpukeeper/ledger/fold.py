"""State from journal: the fold itself is lifecycle/remember.py."""

from gpukeeper.lifecycle.remember import closes, decision_words, is_gone, remember

__all__ = ["closes", "decision_words", "is_gone", "remember"]
