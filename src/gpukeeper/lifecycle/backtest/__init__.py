"""What a policy would have done to recorded work: the rules themselves, over recorded time. Pure."""
