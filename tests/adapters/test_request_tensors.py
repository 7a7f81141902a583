"""What is no plain tensor is refused by name, by every adapter."""

import re
from typing import Any

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.masked import masked_tensor

from graphhal.adapters.covo_audio import CovoAudioFactory
from graphhal.adapters.qwen3_omni_audio import Qwen3OmniAudioFactory
from graphhal.adapters.qwen3_omni_vision import Qwen3OmniVisionFactory
from graphhal.adapters.siglip import SiglipFactory
from graphhal.errors import InputError

TOWERS: dict[str, tuple[Any, str, tuple[int, ...], dict[str, Any]]] = {
    "qwen3_omni_vision": (
        Qwen3OmniVisionFactory(),
        "pixel_values",
        (32, 1536),
        {"image_grid_thw": [[1, 4, 8]]},
    ),
    "qwen3_omni_audio": (
        Qwen3OmniAudioFactory(),
        "input_features",
        (128, 100),
        {"feature_lens": [100]},
    ),
    "covo_audio": (CovoAudioFactory(), "audio_features", (1, 128, 3000), {}),
    "siglip": (SiglipFactory(), "pixel_values", (1, 3, 224, 224), {}),
}


def nested(x: torch.Tensor) -> torch.Tensor:
    return torch.nested.nested_tensor(list(x))


def masked(x: torch.Tensor) -> torch.Tensor:
    return masked_tensor(x, x > 0)


def fake(x: torch.Tensor) -> torch.Tensor:
    with FakeTensorMode():
        return torch.empty(x.shape)


@pytest.mark.filterwarnings("ignore:.*nested tensors is in prototype:UserWarning")
@pytest.mark.filterwarnings("ignore:.*MaskedTensors is in prototype:UserWarning")
@pytest.mark.parametrize("tower", TOWERS)
@pytest.mark.parametrize(
    ("wrap", "name"), [(nested, "nested tensor"), (masked, "MaskedTensor"), (fake, "FakeTensor")]
)
def test_what_is_no_plain_tensor_is_refused_by_name(tower: str, wrap: Any, name: str) -> None:
    factory, key, shape, sizes = TOWERS[tower]
    adapter = factory.build("tiny", torch.device("cpu"), torch.float32)
    request = {key: wrap(torch.ones(shape)), **sizes}
    with pytest.raises(InputError, match=re.escape(f"{key} is a {name}; pass a plain tensor")):
        adapter.item_specs(request)


@pytest.mark.filterwarnings("ignore:.*nested tensors is in prototype:UserWarning")
def test_nested_sizes_are_refused_by_name() -> None:
    adapter = Qwen3OmniVisionFactory().build("tiny", torch.device("cpu"), torch.float32)
    grid = torch.nested.nested_tensor([torch.tensor([1, 4, 8])])
    with pytest.raises(InputError, match=r"^image_grid_thw is nested on cpu; pass its values"):
        adapter.item_specs({"pixel_values": torch.zeros(32, 1536), "image_grid_thw": grid})
