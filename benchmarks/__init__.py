"""What gpukeeper claims about its speed, measured: one claim, one file. Figures are printed, never asserted."""
