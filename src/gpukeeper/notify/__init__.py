"""Messages to people, over channels: one file, one channel. The list of them is in catalog.py."""
