"""Views of an acceptance report, and the directory that stores them."""
