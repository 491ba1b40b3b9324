"""The command line. One verb, one file; heavy imports happen inside the verbs, so that --help is quick."""
