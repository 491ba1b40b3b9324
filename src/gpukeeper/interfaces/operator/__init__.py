"""`operator`: the loop of `serve` inside a cluster, where one of several leads and probes and Prometheus ask."""
