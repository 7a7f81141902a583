"""Platform `rocm`: AMD GPUs. See `plugin.py`, and `graph.py` for how they differ from CUDA."""
