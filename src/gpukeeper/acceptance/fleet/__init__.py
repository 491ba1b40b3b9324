"""An acceptance run over many nodes: what is to run, what each node reported, which node is bad. Pure."""
