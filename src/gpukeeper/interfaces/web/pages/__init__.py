"""One page, one file: what a template gets, from values of `views` alone."""
