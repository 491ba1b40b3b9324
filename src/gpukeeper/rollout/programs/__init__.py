"""Sent to servers; they import nothing of gpukeeper."""
