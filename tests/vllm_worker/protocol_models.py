"""Small models with vLLM's encoder-graph protocol, one for each of its special cases."""

import types
from typing import Any

import torch

AXIS_KEYS = "encoder_cudagraph_axis_keys"


def spec(input_size: int, output_tokens: int, **paths: int) -> Any:
    return types.SimpleNamespace(
        input_size=input_size, output_tokens=output_tokens, path_output_tokens=paths
    )


def config(**changes: Any) -> Any:
    known = {
        "modalities": ["image"],
        "buffer_keys": ["pixel_values"],
        "out_hidden_size": 6,
        "padding_logics": {},
        "max_frames_per_video": 1,
        "paths": {},
        "capture_axes": (),
    }
    return types.SimpleNamespace(**(known | changes))


class Base(torch.nn.Module):
    """Images of 4 rows of 8 numbers, each row one token of width 6."""

    rows = 4

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.tower = torch.nn.Linear(8, 6)

    def get_encoder_cudagraph_config(self) -> Any:
        return config()

    def get_input_modality(self, mm_kwargs: dict[str, Any]) -> str:
        return "image"

    def get_max_frames_per_video(self) -> int:
        return 1

    def get_encoder_cudagraph_budget_range(self, vllm_config: Any) -> tuple[int, int]:
        return (4, 32)

    def get_encoder_cudagraph_item_specs(self, mm_kwargs: dict[str, Any]) -> list[Any]:
        return [spec(self.rows, self.rows) for _ in mm_kwargs["pixel_values"]]

    def select_encoder_cudagraph_items(
        self, mm_kwargs: dict[str, Any], indices: list[int]
    ) -> dict[str, Any]:
        return {"pixel_values": mm_kwargs["pixel_values"][indices]}

    def prepare_encoder_cudagraph_capture_inputs(
        self,
        token_budget: int,
        max_batch_size: int,
        max_frames_per_batch: int,
        device: torch.device,
        dtype: torch.dtype,
        path: str = "default",
        axis_keys: Any = None,
    ) -> Any:
        images = max(1, token_budget // self.rows)
        return types.SimpleNamespace(values={"pixel_values": torch.randn(images, self.rows, 8)})

    def prepare_encoder_cudagraph_replay_buffers(
        self,
        mm_kwargs: dict[str, Any],
        max_batch_size: int,
        max_frames_per_batch: int,
        path: str = "default",
    ) -> Any:
        return types.SimpleNamespace(values={"pixel_values": mm_kwargs["pixel_values"]})

    def encoder_cudagraph_forward(
        self, inputs: dict[str, torch.Tensor], path: str = "default"
    ) -> torch.Tensor:
        return self.tower(inputs["pixel_values"]).flatten(0, 1)

    def encoder_eager_forward(
        self, mm_kwargs: dict[str, Any], path: str = "default"
    ) -> torch.Tensor:
        return self.tower(mm_kwargs["pixel_values"]).flatten(0, 1)

    def postprocess_encoder_output(
        self,
        outputs: dict[str, torch.Tensor],
        indices: list[int],
        per_item_out_tokens: list[int],
        dest: Any,
        clone: bool = False,
        batch_mm_kwargs: dict[str, Any] | None = None,
    ) -> None:
        at = 0
        for index in indices:
            dest[index] = outputs["default"][at : at + per_item_out_tokens[index]]
            at += per_item_out_tokens[index]

    def embed_multimodal(self, **mm_kwargs: Any) -> list[torch.Tensor]:
        return list(self.tower(mm_kwargs["pixel_values"]))


class FewItems(Base):
    """Whose dummy inputs are as many pictures as a graph takes, as Step3-VL's."""

    rows = 5

    def prepare_encoder_cudagraph_capture_inputs(
        self, token_budget: int, max_batch_size: int, *rest: Any, **more: Any
    ) -> Any:
        images = min(max_batch_size, token_budget // self.rows)
        return types.SimpleNamespace(values={"pixel_values": torch.randn(images, self.rows, 8)})


class TwoPaths(Base):
    """A whole picture (4 tokens) and 0 or more crops (2 tokens each), assembled afterwards."""

    wholes = "global"

    def get_encoder_cudagraph_config(self) -> Any:
        rule = types.SimpleNamespace
        return config(
            paths={
                self.wholes: rule(min_token_budget=4, allow_zero_tokens=False),
                "local": rule(min_token_budget=2, allow_zero_tokens=True),
            }
        )

    def get_encoder_cudagraph_item_specs(self, mm_kwargs: dict[str, Any]) -> list[Any]:
        return [
            spec(4, 4 + 2 * n, **{self.wholes: 4, "local": 2 * n}) for n in mm_kwargs["num_crops"]
        ]

    def select_encoder_cudagraph_items(
        self, mm_kwargs: dict[str, Any], indices: list[int]
    ) -> dict[str, Any]:
        crops = mm_kwargs["crops"].split(mm_kwargs["num_crops"])
        return {
            "pixel_values": mm_kwargs["pixel_values"][indices],
            "crops": torch.cat([crops[i] for i in indices]),
            "num_crops": [mm_kwargs["num_crops"][i] for i in indices],
        }

    def prepare_encoder_cudagraph_capture_inputs(
        self,
        token_budget: int,
        max_batch_size: int,
        max_frames_per_batch: int,
        device: torch.device,
        dtype: torch.dtype,
        path: str = "default",
        axis_keys: Any = None,
    ) -> Any:
        if path == self.wholes:
            return types.SimpleNamespace(
                values={"pixel_values": torch.randn(token_budget // 4, 4, 8)}
            )
        return types.SimpleNamespace(values={"crops": torch.randn(token_budget // 2, 2, 8)})

    def prepare_encoder_cudagraph_replay_buffers(
        self, mm_kwargs: dict[str, Any], items: int, frames: int, path: str = "default"
    ) -> Any:
        key = "pixel_values" if path == self.wholes else "crops"
        return types.SimpleNamespace(values={key: mm_kwargs[key]})

    def encoder_cudagraph_forward(
        self, inputs: dict[str, torch.Tensor], path: str = "default"
    ) -> torch.Tensor:
        return self.tower(inputs["pixel_values" if path == self.wholes else "crops"]).flatten(0, 1)

    encoder_eager_forward = encoder_cudagraph_forward  # type: ignore[assignment]

    def postprocess_encoder_output(
        self,
        outputs: dict[str, torch.Tensor],
        indices: list[int],
        per_item_out_tokens: list[int],
        dest: Any,
        clone: bool = False,
        batch_mm_kwargs: dict[str, Any] | None = None,
    ) -> None:
        assert batch_mm_kwargs is not None
        first = 0
        for at, index in enumerate(indices):
            crops = 2 * batch_mm_kwargs["num_crops"][at]
            parts = [outputs[self.wholes][4 * at : 4 * at + 4]]
            if crops:
                parts.append(outputs["local"][first : first + crops])
            first += crops
            dest[index] = torch.cat(parts)

    def embed_multimodal(self, **mm_kwargs: Any) -> list[torch.Tensor]:
        crops = mm_kwargs["crops"].split(mm_kwargs["num_crops"])
        return [
            torch.cat([self.tower(picture), self.tower(own).flatten(0, 1)])
            for picture, own in zip(mm_kwargs["pixel_values"], crops, strict=True)
        ]


class PathsWithDefault(TwoPaths):
    """One of whose paths has the name of an only one."""

    wholes = "default"


class PaddedPositions(Base):
    """A tower that adds a table's row for each position; -1 means: none."""

    def __init__(self) -> None:
        super().__init__()
        self.table = torch.nn.Embedding(9, 6)

    def get_encoder_cudagraph_config(self) -> Any:
        def pad(target: torch.Tensor, source: torch.Tensor) -> None:
            target.fill_(-1)
            target[: len(source), : source.shape[1]].copy_(source)

        return config(padding_logics={"positions": pad})

    def select_encoder_cudagraph_items(
        self, mm_kwargs: dict[str, Any], indices: list[int]
    ) -> dict[str, Any]:
        return {name: value[indices] for name, value in mm_kwargs.items()}

    def prepare_encoder_cudagraph_capture_inputs(
        self,
        token_budget: int,
        max_batch_size: int,
        max_frames_per_batch: int,
        device: torch.device,
        dtype: torch.dtype,
        path: str = "default",
        axis_keys: Any = None,
    ) -> Any:
        images = max(1, token_budget // 4)
        return types.SimpleNamespace(
            values={
                "pixel_values": torch.randn(images, 4, 8),
                "positions": torch.full((images, 4), -1),
                "unused": None,
            }
        )

    def prepare_encoder_cudagraph_replay_buffers(
        self, mm_kwargs: dict[str, Any], *rest: Any
    ) -> Any:
        return types.SimpleNamespace(values=dict(mm_kwargs))

    def _encode(self, inputs: dict[str, torch.Tensor]) -> torch.Tensor:
        return self.tower(inputs["pixel_values"]) + self.table(inputs["positions"] + 1)

    def encoder_cudagraph_forward(
        self, inputs: dict[str, torch.Tensor], path: str = "default"
    ) -> torch.Tensor:
        return self._encode(inputs).flatten(0, 1)

    encoder_eager_forward = encoder_cudagraph_forward  # type: ignore[assignment]

    def embed_multimodal(self, **mm_kwargs: Any) -> list[torch.Tensor]:
        return list(self._encode(mm_kwargs))


class CaptureAxes(Base):
    """The tower scales by a number that is baked at capture: 1, 2 or 3, the group's largest."""

    def __init__(self) -> None:
        super().__init__()
        self.captured_with: list[Any] = []

    def get_encoder_cudagraph_config(self) -> Any:
        return config(capture_axes=((1, 2, 3),))

    def select_encoder_cudagraph_items(
        self, mm_kwargs: dict[str, Any], indices: list[int]
    ) -> dict[str, Any]:
        scales = [mm_kwargs["scales"][i] for i in indices]
        return {
            "pixel_values": mm_kwargs["pixel_values"][indices],
            "scales": scales,
            AXIS_KEYS: (max(scales),),
        }

    def prepare_encoder_cudagraph_capture_inputs(
        self,
        token_budget: int,
        max_batch_size: int,
        max_frames_per_batch: int,
        device: torch.device,
        dtype: torch.dtype,
        path: str = "default",
        axis_keys: Any = None,
    ) -> Any:
        (scale,) = axis_keys
        self.captured_with.append((token_budget, scale))
        images = max(1, token_budget // 4)
        values = {"pixel_values": torch.randn(images, 4, 8), "scale": torch.zeros(scale)}
        return types.SimpleNamespace(values=values)

    def prepare_encoder_cudagraph_replay_buffers(
        self, mm_kwargs: dict[str, Any], items: int, frames: int, path: str = "default"
    ) -> Any:
        scale = torch.zeros(max(mm_kwargs["scales"]))
        return types.SimpleNamespace(
            values={"pixel_values": mm_kwargs["pixel_values"], "scale": scale}
        )

    def encoder_cudagraph_forward(
        self, inputs: dict[str, torch.Tensor], path: str = "default"
    ) -> torch.Tensor:
        scale = len(inputs["scale"])  # a host number, baked
        return self.tower(inputs["pixel_values"]).flatten(0, 1) * scale

    def encoder_eager_forward(
        self, mm_kwargs: dict[str, Any], path: str = "default"
    ) -> torch.Tensor:
        return torch.cat(self.embed_multimodal(**mm_kwargs))

    def embed_multimodal(self, **mm_kwargs: Any) -> list[torch.Tensor]:
        return list(self.tower(mm_kwargs["pixel_values"]) * max(mm_kwargs["scales"]))


class SizedGrids(Base):
    """As MiniCPM-V: a capture axis of grids, the largest for whatever none covers; a tower that
    adds the last column's place, and a graph that knows no place outside of its grid."""

    def get_encoder_cudagraph_config(self) -> Any:
        return config(capture_axes=(((2, 2), (4, 4)),))

    def select_encoder_cudagraph_items(
        self, mm_kwargs: dict[str, Any], indices: list[int]
    ) -> dict[str, Any]:
        sizes = self._sizes(mm_kwargs)[indices]
        grid = (2, 2) if int(sizes.max()) <= 2 else (4, 4)
        selected = super().select_encoder_cudagraph_items(mm_kwargs, indices)
        return selected | {"tgt_sizes": sizes, AXIS_KEYS: (grid,)}

    def prepare_encoder_cudagraph_capture_inputs(
        self,
        token_budget: int,
        max_batch_size: int,
        max_frames_per_batch: int,
        device: torch.device,
        dtype: torch.dtype,
        path: str = "default",
        axis_keys: Any = None,
    ) -> Any:
        images = max(1, token_budget // 4)
        values = {
            "pixel_values": torch.randn(images, 4, 8),
            "sizes": torch.tensor([axis_keys[0]] * images),
        }
        return types.SimpleNamespace(values=values)

    def prepare_encoder_cudagraph_replay_buffers(
        self, mm_kwargs: dict[str, Any], *rest: Any
    ) -> Any:
        values = {"pixel_values": mm_kwargs["pixel_values"], "sizes": mm_kwargs["tgt_sizes"]}
        return types.SimpleNamespace(values=values)

    def _sizes(self, mm_kwargs: dict[str, Any]) -> torch.Tensor:
        given = next(value for key, value in mm_kwargs.items() if key.endswith("tgt_sizes"))
        return torch.cat(given) if isinstance(given, list) else given

    def _encode(self, pixels: torch.Tensor, columns: torch.Tensor) -> torch.Tensor:
        return self.tower(pixels) + columns[:, None, None]

    def encoder_cudagraph_forward(
        self, inputs: dict[str, torch.Tensor], path: str = "default"
    ) -> torch.Tensor:
        columns = inputs["sizes"][:, 1].clamp(max=4)
        return self._encode(inputs["pixel_values"], columns).flatten(0, 1)

    def encoder_eager_forward(
        self, mm_kwargs: dict[str, Any], path: str = "default"
    ) -> torch.Tensor:
        return torch.cat(self.embed_multimodal(**mm_kwargs))

    def embed_multimodal(self, **mm_kwargs: Any) -> list[torch.Tensor]:
        return list(self._encode(mm_kwargs["pixel_values"], self._sizes(mm_kwargs)[:, 1]))


class BakedAxes(CaptureAxes):
    """The number is a host scalar: a graph of a larger one takes what is prepared for a smaller."""

    def prepare_encoder_cudagraph_capture_inputs(
        self,
        token_budget: int,
        max_batch_size: int,
        max_frames_per_batch: int,
        device: torch.device,
        dtype: torch.dtype,
        path: str = "default",
        axis_keys: Any = None,
    ) -> Any:
        made = super().prepare_encoder_cudagraph_capture_inputs(
            token_budget, max_batch_size, max_frames_per_batch, device, dtype, path, axis_keys
        )
        made.values["scale"] = torch.tensor(len(made.values["scale"]))
        return made

    def prepare_encoder_cudagraph_replay_buffers(self, *args: Any) -> Any:
        made = super().prepare_encoder_cudagraph_replay_buffers(*args)
        made.values["scale"] = torch.tensor(len(made.values["scale"]))
        return made

    def encoder_cudagraph_forward(
        self, inputs: dict[str, torch.Tensor], path: str = "default"
    ) -> torch.Tensor:
        return self.tower(inputs["pixel_values"]).flatten(0, 1) * inputs["scale"]


class Slots(Base):
    """Images of 2 or 4 tokens in slots of 4, gathered by index: the indices count in slots of the
    group's own size, so that they fit no graph with larger ones."""

    def __init__(self, right: bool = False) -> None:
        super().__init__()
        self.right = right

    def get_encoder_cudagraph_config(self) -> Any:
        def pad(target: torch.Tensor, source: torch.Tensor) -> None:
            target.zero_()
            target[: len(source), : source.shape[1]].copy_(source)

        return config(padding_logics={"pixel_values": pad})

    def get_encoder_cudagraph_item_specs(self, mm_kwargs: dict[str, Any]) -> list[Any]:
        images, tokens = mm_kwargs["pixel_values"].shape[:2]
        return [spec(tokens, tokens) for _ in range(images)]

    def prepare_encoder_cudagraph_capture_inputs(
        self,
        token_budget: int,
        max_batch_size: int,
        max_frames_per_batch: int,
        device: torch.device,
        dtype: torch.dtype,
        path: str = "default",
        axis_keys: Any = None,
    ) -> Any:
        return types.SimpleNamespace(
            values={
                "pixel_values": torch.randn(max_batch_size, 4, 8),
                "gather": torch.zeros(token_budget, dtype=torch.long),
            }
        )

    def prepare_encoder_cudagraph_replay_buffers(
        self, mm_kwargs: dict[str, Any], items: int, frames: int, path: str = "default"
    ) -> Any:
        pixels = mm_kwargs["pixel_values"]
        slot = 4 if self.right else pixels.shape[1]
        places = torch.arange(len(pixels))[:, None] * slot + torch.arange(pixels.shape[1])
        return types.SimpleNamespace(values={"pixel_values": pixels, "gather": places.flatten()})

    def encoder_cudagraph_forward(
        self, inputs: dict[str, torch.Tensor], path: str = "default"
    ) -> torch.Tensor:
        return self.tower(inputs["pixel_values"]).flatten(0, 1)[inputs["gather"]]


class OneAxis(CaptureAxes):
    """A capture axis of one key; the selection makes what the buffers are prepared from."""

    def get_encoder_cudagraph_config(self) -> Any:
        return config(capture_axes=((1,),))

    def select_encoder_cudagraph_items(
        self, mm_kwargs: dict[str, Any], indices: list[int]
    ) -> dict[str, Any]:
        return super().select_encoder_cudagraph_items(mm_kwargs, indices) | {"selected": True}

    def prepare_encoder_cudagraph_replay_buffers(
        self, mm_kwargs: dict[str, Any], items: int, frames: int, path: str = "default"
    ) -> Any:
        assert mm_kwargs["selected"]
        return super().prepare_encoder_cudagraph_replay_buffers(mm_kwargs, items, frames, path)


class Patches(Base):
    """Pictures of patches, four to a token. The bound that it bakes counts tokens, not patches."""

    def __init__(self) -> None:
        super().__init__()
        self.bounds: list[tuple[torch.Tensor, int]] = []

    def get_encoder_cudagraph_item_specs(self, mm_kwargs: dict[str, Any]) -> list[Any]:
        return [spec(h * w, h * w // 4) for h, w in mm_kwargs["image_grid_hws"].tolist()]

    def prepare_encoder_cudagraph_capture_inputs(
        self,
        token_budget: int,
        max_batch_size: int,
        max_frames_per_batch: int,
        device: torch.device,
        dtype: torch.dtype,
        path: str = "default",
        axis_keys: Any = None,
    ) -> Any:
        values = {
            "pixel_values": torch.randn(4 * token_budget, 8),
            "cu_seqlens": torch.tensor([0, 4 * token_budget], dtype=torch.int32),
            "max_seqlen": torch.tensor(token_budget, dtype=torch.int32),
        }
        return types.SimpleNamespace(values=values)

    def prepare_encoder_cudagraph_replay_buffers(
        self, mm_kwargs: dict[str, Any], items: int, frames: int, path: str = "default"
    ) -> Any:
        lengths = mm_kwargs["image_grid_hws"].prod(-1)
        ends = torch.nn.functional.pad(lengths.cumsum(0), (1, 0)).int()
        values = {"pixel_values": mm_kwargs["pixel_values"], "cu_seqlens": ends}
        return types.SimpleNamespace(values=values | self.bound(lengths))

    def bound(self, lengths: torch.Tensor) -> dict[str, torch.Tensor]:
        return {"max_seqlen": lengths.max().int()}

    def patches(self, inputs: dict[str, torch.Tensor]) -> torch.Tensor:
        self.bounds.append((inputs["max_seqlen"], len(inputs["pixel_values"])))
        return self.tower(inputs["pixel_values"])

    def encoder_cudagraph_forward(
        self, inputs: dict[str, torch.Tensor], path: str = "default"
    ) -> torch.Tensor:
        return self.patches(inputs).reshape(-1, 4, 6).mean(1)

    def encoder_eager_forward(
        self, mm_kwargs: dict[str, Any], path: str = "default"
    ) -> torch.Tensor:
        return self.tower(mm_kwargs["pixel_values"]).reshape(-1, 4, 6).mean(1)

    def embed_multimodal(self, **mm_kwargs: Any) -> list[torch.Tensor]:
        sizes = mm_kwargs["image_grid_hws"].prod(-1) // 4
        return list(self.encoder_eager_forward(mm_kwargs).split(sizes.tolist()))


class MergesAfterwards(Patches):
    """Its graph makes patches; the model merges them in its postprocessing, to another width."""

    def __init__(self) -> None:
        super().__init__()
        self.merger = torch.nn.Linear(24, 5)

    def bound(self, lengths: torch.Tensor) -> dict[str, torch.Tensor]:
        return {}  # baked, and not prepared again

    def encoder_cudagraph_forward(
        self, inputs: dict[str, torch.Tensor], path: str = "default"
    ) -> torch.Tensor:
        return self.patches(inputs)

    def encoder_eager_forward(
        self, mm_kwargs: dict[str, Any], path: str = "default"
    ) -> torch.Tensor:
        return self.merger(self.tower(mm_kwargs["pixel_values"]).reshape(-1, 24))

    def postprocess_encoder_output(
        self,
        outputs: dict[str, torch.Tensor],
        indices: list[int],
        per_item_out_tokens: list[int],
        dest: Any,
        clone: bool = False,
        batch_mm_kwargs: dict[str, Any] | None = None,
    ) -> None:
        assert batch_mm_kwargs is not None
        rows = int(batch_mm_kwargs["image_grid_hws"].prod(-1).sum())
        merged = self.merger(outputs["default"][:rows].reshape(-1, 24))
        super().postprocess_encoder_output(
            {"default": merged}, indices, per_item_out_tokens, dest, clone, batch_mm_kwargs
        )


class Selects(Base):
    """Whose selection of items is more than their part of the request: another key, other numbers,
    and the axes with what its postprocessing reads."""

    def __init__(self, how: str) -> None:
        super().__init__()
        self.how = how

    def get_encoder_cudagraph_config(self) -> Any:
        return config(capture_axes=((1, 2),) if self.how == "axes" else ())

    def select_encoder_cudagraph_items(
        self, mm_kwargs: dict[str, Any], indices: list[int]
    ) -> dict[str, Any]:
        selected = super().select_encoder_cudagraph_items(mm_kwargs, indices)
        more: dict[str, Any] = {"scale": 2.0, "count": len(indices)}
        if self.how == "numbers":
            more = {"pixel_values": selected["pixel_values"] * 2}
        return selected | more | ({AXIS_KEYS: (2,)} if self.how == "axes" else {})

    def _pixels(self, mm_kwargs: dict[str, Any]) -> torch.Tensor:
        pixels = mm_kwargs["pixel_values"]
        return pixels if self.how == "numbers" else pixels * mm_kwargs["scale"]

    def prepare_encoder_cudagraph_replay_buffers(
        self, mm_kwargs: dict[str, Any], *rest: Any, **more: Any
    ) -> Any:
        return types.SimpleNamespace(values={"pixel_values": self._pixels(mm_kwargs)})

    def encoder_eager_forward(
        self, mm_kwargs: dict[str, Any], path: str = "default"
    ) -> torch.Tensor:
        return self.tower(self._pixels(mm_kwargs)).flatten(0, 1)

    def postprocess_encoder_output(  # type: ignore[override]
        self, outputs: Any, indices: list[int], tokens: list[int], dest: Any, **more: Any
    ) -> None:
        assert self.how == "numbers" or more["batch_mm_kwargs"]["count"] == len(indices)
        super().postprocess_encoder_output(outputs, indices, tokens, dest)

    def embed_multimodal(self, **mm_kwargs: Any) -> list[torch.Tensor]:
        return list(self.tower(mm_kwargs["pixel_values"] * 2))


class Batched(Base):
    """Whose outputs have a leading dimension of one."""

    def encoder_cudagraph_forward(
        self, inputs: dict[str, torch.Tensor], path: str = "default"
    ) -> torch.Tensor:
        return super().encoder_cudagraph_forward(inputs)[None]

    def encoder_eager_forward(
        self, mm_kwargs: dict[str, Any], path: str = "default"
    ) -> torch.Tensor:
        return super().encoder_eager_forward(mm_kwargs)[None]


class LosesRows(Base):
    """Whose postprocessing leaves out the last row of each item."""

    def postprocess_encoder_output(  # type: ignore[override]
        self, outputs: Any, indices: list[int], tokens: list[int], dest: Any, **more: Any
    ) -> None:
        super().postprocess_encoder_output(outputs, indices, tokens, dest)
        for index in indices:
            dest[index] = dest[index][:-1]
