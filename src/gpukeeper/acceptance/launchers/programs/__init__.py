"""Programs that run on the nodes of an engine. They import nothing of gpukeeper: their source is sent there."""
