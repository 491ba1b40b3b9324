"""What gpukeeper knows about each kind of Kubernetes: one kind or family, one file. catalog.py lists them."""
