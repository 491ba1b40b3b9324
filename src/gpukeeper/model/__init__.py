"""What things are: frozen values. No I/O, no clock, no platform words."""
