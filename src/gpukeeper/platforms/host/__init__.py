"""This machine itself: its GPUs and who holds them, its disks and the trees on them. Only trees are removed."""
