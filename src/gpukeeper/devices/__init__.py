"""GPUs: what the driver says, and who has them open."""
