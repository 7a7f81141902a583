"""A graphhal platform over `torch.accelerator.Graph`."""
