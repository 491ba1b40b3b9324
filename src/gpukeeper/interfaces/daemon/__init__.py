"""The daemon's ear: a unix socket on which people ask, each with the rights of the uid that the kernel names."""
