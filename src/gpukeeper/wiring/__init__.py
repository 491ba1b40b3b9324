"""The only package that imports both ports and adapters."""
