"""This machine: its GPUs and their holders, its disks and the trees on them. Only trees are removed."""
