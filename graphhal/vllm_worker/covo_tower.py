"""The adapter of vLLM-Omni's CoVo-Audio stage: its own code is the eager call.

So the self-check compares a graph with what vLLM-Omni would have answered: a stage that does more
than was read loses its graphs, and never answers wrongly.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from graphhal.adapter import Place
from graphhal.adapters.covo_audio import COUNTS, FEATURES, CovoAudio
from graphhal.items import ItemSpec


class VllmCovoAudio(CovoAudio):
    """`CovoAudioLLMForConditionalGeneration`, alone or inside the pipeline's class.

    Args:
        stage: the model that encodes.
        above: where what holds the stage keeps it.
    """

    def __init__(self, stage: Any, above: Sequence[Place] = ()) -> None:
        super().__init__(stage)
        self.above = above

    def places(self) -> Sequence[Place]:
        """Where the stage keeps its modules, and where it is kept."""
        return (*super().places(), *self.above)

    def eager_inputs(
        self, mm_kwargs: Mapping[str, Any], items: Sequence[ItemSpec]
    ) -> dict[str, torch.Tensor]:
        """The clips' features and counts, for `forward` to run the stage's own code."""
        counts = torch.tensor([item.tokens for item in items])
        return super().eager_inputs(mm_kwargs, items) | {COUNTS: counts}

    def forward(
        self, inputs: Mapping[str, torch.Tensor], max_seqlen: Mapping[str, int]
    ) -> torch.Tensor:
        """Tokens (tokens, hidden of the language model)."""
        if COUNTS not in inputs:
            return super().forward(inputs, max_seqlen)
        request = {name: inputs[name] for name in (FEATURES, COUNTS)}
        return torch.cat(list(self.owner.embed_multimodal(**request)))
