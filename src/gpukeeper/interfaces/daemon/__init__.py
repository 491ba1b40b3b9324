"""The daemon: passes, and a unix socket for requests, each with the rights of the peer's uid."""
