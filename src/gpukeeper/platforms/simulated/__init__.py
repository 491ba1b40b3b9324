"""A seeded fleet that ships with gpukeeper: it feeds the demo, the contract suite and the simulation tests."""
