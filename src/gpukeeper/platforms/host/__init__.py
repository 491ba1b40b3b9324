"""This machine itself: its GPUs, the processes that hold them, its temporary trees. Always there, looks only."""
