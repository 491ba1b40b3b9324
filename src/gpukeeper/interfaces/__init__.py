"""How people reach gpukeeper: command line and daemon. They know wiring, never each other."""
