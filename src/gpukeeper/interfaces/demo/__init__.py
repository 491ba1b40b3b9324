"""`gpukeeper demo`: the simulated fleet on the terminal, and behind a dashboard."""
