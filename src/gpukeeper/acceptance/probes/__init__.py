"""Programs that run on a GPU, in processes of their own. They need PyTorch and the standard library, nothing else of
gpukeeper, and no module imports them."""
