"""Platform `npu`: Ascend through torch_npu's graphs and fused inference attention."""
