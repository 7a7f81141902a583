"""How large graphs may become: vLLM's encoder-graph options and graphhal's, in one place."""

from collections.abc import Callable
from dataclasses import dataclass
from math import ceil
from typing import Any

from graphhal.adapters.token_ladder import token_budgets
from graphhal.errors import SettingsError
from graphhal.settings import Settings

BUDGETS = "compilation_config.encoder_cudagraph_token_budgets"
ITEMS = "compilation_config.encoder_cudagraph_max_vision_items_per_batch"
FRAMES = "compilation_config.encoder_cudagraph_max_frames_per_batch"


FREE_SLOTS = ("FLASH_ATTN 3", "FLASH_ATTN 4")
"""Attention backends of vLLM, with the version of FlashAttention, that skip sequences without rows.
A kernel that walks every slot to its bound (TRITON_ATTN, FlashAttention 2) takes longer for each:
784 tokens 62 ms with 64 slots, 40 with 8 (TRITON_ATTN, H200). One that takes no empty sequence
(ROCm's) needs a row for every spare slot."""
MOST_ITEMS = 64
"""Items in a graph where slots are free and no option says how many: as many as vLLM's own manager
takes for Qwen's towers, whose smallest budget is 64."""


@dataclass(frozen=True, slots=True)
class Limits:
    """Sizes that graphs may have.

    Attributes:
        budgets: token budgets that an option names; None where the ladder is chosen.
        low: smallest budget of a chosen ladder.
        high: largest budget of a chosen ladder.
        items: items in one graph, at most.
        frames: video frames in one graph, at most; 0 where no video can come.
        exact: graphs have room for no more than their tokens, and for as few items as that takes.
    """

    budgets: tuple[int, ...] | None
    low: int
    high: int
    items: int
    frames: int
    exact: bool = False

    def items_for(self, budget: int) -> int:
        """Items in a graph of this budget: every item has a token or more."""
        return self._shape(budget)[0]

    def frames_for(self, budget: int) -> int:
        """Frames in a graph of this budget: every frame has a token or more."""
        return self._shape(budget)[1]

    def _shape(self, budget: int) -> tuple[int, int]:
        """(items, frames).

        Models prepare a graph with equal room for each item, and for each frame of it, rounded up:
        64 items in a budget of 208 tokens would make a graph of 256. So a graph may take fewer,
        but not less than half; the largest takes all, whatever that adds to it. Not so where
        only `exact` ones count.
        """
        most = min(self.items, budget)
        frames = max(most, min(self.frames, budget))
        if budget >= self.high and not self.exact:
            return most, frames
        shapes = [
            (items, each)
            for items in self._down_from(most)
            for each in self._down_from(frames // items)
        ]
        items, each = min(shapes, key=lambda shape: _room(budget, *shape))
        if each == 1 and not self.exact:
            return items, max(items, min(self.frames, budget))
        return items, items * each

    def _down_from(self, most: int) -> range:
        return range(most, 0 if self.exact else most // 2, -1)


def _room(budget: int, items: int, frames: int) -> int:
    """Tokens of a graph that has equal room for each frame of each item."""
    return items * frames * ceil(ceil(budget / items) / frames)


def dense_budgets(high: int) -> tuple[int, ...]:
    """graphhal's dense ladder up to `high`; graphs share their memory, so it costs none."""
    return token_budgets(Settings.model_construct(token_budgets=None, max_tokens=high))


def ladder_of(
    limits: Limits, minimum: int | None, packs_rows: Callable[[int], bool]
) -> tuple[int, ...]:
    """Token budgets of one of a model's paths: dense where rows are packed, vLLM's own powers of
    two elsewhere.

    Args:
        limits: of the model.
        minimum: smallest budget of the path; None for the model's own range.
        packs_rows: whether a graph of this budget would.
    """
    named = limits.budgets
    if named is not None and (minimum is None or not named):
        return named
    low = minimum or limits.low
    if low > limits.high:
        return ()
    packed = packs_rows(low)
    return dense_budgets(limits.high) if packed and minimum is None else _doubling(low, limits.high)


def _doubling(low: int, high: int) -> tuple[int, ...]:
    """vLLM's own ladder: doubling from `low`, and `high`."""
    budgets = [low]
    while budgets[-1] * 2 <= high:
        budgets.append(budgets[-1] * 2)
    return tuple(budgets if budgets[-1] == high else [*budgets, high])


def merged(settings: Settings, compilation: Any) -> Settings:
    """Settings with vLLM's encoder-graph options in them.

    Raises:
        SettingsError: both sides set one option, differently; or vLLM's is a number that none can
            be.
    """
    changes: dict[str, Any] = {}
    theirs = tuple(sorted(set(getattr(compilation, BUDGETS.rpartition(".")[2], None) or ())))
    if theirs:
        _at_least(1, theirs[0], BUDGETS, theirs)
        _agree(settings, "token_budgets", theirs, BUDGETS)
        changes["token_budgets"] = theirs
    items = getattr(compilation, ITEMS.rpartition(".")[2], None)
    if items:
        _at_least(0, items, ITEMS, items)
        _agree(settings, "max_items", items, ITEMS)
        changes["max_items"] = items
    frames = getattr(compilation, FRAMES.rpartition(".")[2], None)
    if frames is not None:  # 0 is a number here: no films
        _at_least(0, frames, FRAMES, frames)
        _agree(settings, "max_frames", frames, FRAMES)
        changes["max_frames"] = frames
    return settings.model_copy(update=changes)


def _at_least(least: int, smallest: int, name: str, value: Any) -> None:
    if smallest < least:
        raise SettingsError(f"vLLM's {name} is {_shown(value)}; whole numbers from {least} on")


def _agree(settings: Settings, name: str, theirs: Any, their_name: str) -> None:
    ours = getattr(settings, name)
    if name in settings.model_fields_set and ours != theirs:
        raise SettingsError(
            f"vLLM's {their_name} is {_shown(theirs)}, but graphhal's {name} is {_shown(ours)}; "
            "set one of them, or both alike"
        )


def _shown(value: Any) -> str:
    return str(list(value)) if isinstance(value, tuple) else str(value)


def with_free_slots(settings: Settings, model: Any, allow_empty: bool) -> Settings:
    """Settings with `MOST_ITEMS`, where no option says otherwise and the encoder's attention takes
    more slots at no cost: a server's steps hold more pictures than graphs of a few items do.

    Args:
        settings: already `merged` with vLLM's options.
        model: whose attention layers are looked through.
        allow_empty: whether the platform lets a slot be empty.
    """
    backends = {
        f"{getattr(module.attn_backend, 'name', 'unknown')} {getattr(module, '_fa_version', None)}"
        for module in model.modules()
        if any(base.__name__ == "MMEncoderAttention" for base in type(module).__mro__)
    }
    free = allow_empty and backends and backends <= {*FREE_SLOTS}
    if "max_items" in settings.model_fields_set or not free:
        return settings
    return settings.model_copy(update={"max_items": MOST_ITEMS})


def limits_of(settings: Settings, vllm_config: Any, model: Any) -> Limits:
    """Limits for a model with the protocol.

    Args:
        settings: already `merged` with vLLM's options.
        vllm_config: the engine's configuration.
        model: asked for its budget range where no option names budgets.
    """
    low, high = 1, settings.max_tokens
    if settings.token_budgets is None:
        low, high = (int(n) for n in model.get_encoder_cudagraph_budget_range(vllm_config))
        if low < 1 or high < 1:
            raise SettingsError(f"{type(model).__name__} names the budget range {low} to {high}")
        high = min(high, settings.max_tokens)
        low = min(low, high)
    elif settings.token_budgets:
        low, high = settings.token_budgets[0], settings.token_budgets[-1]
    return Limits(
        settings.token_budgets,
        low,
        high,
        settings.max_items,
        frames_of(settings, vllm_config),
        settings.exact_only,
    )


def most_tokens(settings: Settings, vllm_config: Any) -> int:
    """Largest budget of a chosen ladder: no group is larger than what one step may schedule."""
    scheduled = getattr(vllm_config.scheduler_config, "max_num_batched_tokens", None)
    return min(settings.max_tokens, scheduled) if scheduled else settings.max_tokens


def frames_of(settings: Settings, vllm_config: Any) -> int:
    """Video frames in one graph, at most; 0 where no video can come."""
    multimodal = vllm_config.model_config.multimodal_config
    return 0 if multimodal.get_limit_per_prompt("video") == 0 else settings.max_frames
