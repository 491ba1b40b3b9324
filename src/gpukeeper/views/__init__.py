"""What people are shown, as values that terminal, JSON and others render. Pure: no I/O, no clock, no printing."""
