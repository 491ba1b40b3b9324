"""`operator`: the loop of `serve` inside a cluster, with leader election, health probes and metrics."""
