"""GPUs: what the driver reports, and which processes have them open."""
