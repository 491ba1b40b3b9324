"""What a good GPU is. Pure: the same answers, limits and history give the same findings."""
