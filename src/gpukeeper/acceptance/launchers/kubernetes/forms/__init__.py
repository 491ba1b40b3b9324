"""One form of objects, one file: from a plan to manifests. Pure."""
