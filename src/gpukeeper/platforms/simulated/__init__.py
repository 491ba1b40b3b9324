"""A seeded fleet that ships with gpukeeper: used by the demo, the contract suite and the simulation tests."""
