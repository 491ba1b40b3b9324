"""Accepting GPUs into service: checks and judging, the machine under test, probes, reports, and a run."""
