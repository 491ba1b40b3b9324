"""Policies from the settings of other tools: one tool, one file. Pure; never broader than the original."""
