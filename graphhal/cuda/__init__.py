"""Platform `cuda`: NVIDIA GPUs. See `plugin.py`."""
