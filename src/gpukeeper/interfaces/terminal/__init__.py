"""What every interface on a terminal shares: the flags, an open session, and how things are shown."""
