"""One rule, one file: NAME, SAYS, FOR, ACTS and `ask(view, settings, now) -> Answer`; declared.py lists what else."""
