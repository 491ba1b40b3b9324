"""Views of an acceptance report, and the folder that keeps them."""
