"""Lets the published torchvision be imported beside a torch without CUDA.

Its compiled library links the CUDA runtime and is skipped where that is missing; two operators are
then unknown when torchvision registers their fake kernels. Declaring them is enough: no encoder
calls them. Import this before torchvision, transformers or vLLM.
"""

import torch

_OPERATORS = ("nms", "qnms")
_library = torch.library.Library("torchvision", "FRAGMENT")

for _name in _OPERATORS:
    if not hasattr(torch.ops.torchvision, _name):
        _library.define(f"{_name}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
