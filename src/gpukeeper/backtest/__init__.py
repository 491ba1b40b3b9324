"""Recorded work under several policies: compared, advised on, computed by several processes or on a Ray cluster."""
