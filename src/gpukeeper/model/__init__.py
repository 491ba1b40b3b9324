"""The domain: frozen values. No I/O, no clock, no platform words."""
