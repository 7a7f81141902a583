"""Which encoders of a model get graphs, with which settings, and why the others get none."""

import logging
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch

from graphhal.errors import AdapterError, GraphhalError, SettingsError
from graphhal.platform import Platform
from graphhal.settings import Settings
from graphhal.vllm_worker import memory, ranks, towers
from graphhal.vllm_worker.limits import most_tokens
from graphhal.vllm_worker.refusals import own_code_fails
from graphhal.vllm_worker.served_encoder import ServedEncoder

log = logging.getLogger(__name__)


@dataclass(slots=True)
class Serving:
    """What is served of a model.

    Attributes:
        encoders: that have graphs, in their order.
        refused: why groups of the other encoders run eagerly, by modality.
        refusal: why all groups do; None where any encoder has graphs, or none is asked for.
        limit: bytes that all graphs may take; None for no limit.
    """

    encoders: list[ServedEncoder] = field(default_factory=list)
    refused: dict[str, str] = field(default_factory=dict)
    refusal: str | None = None
    limit: int | None = None

    def refuse(self, encoder: towers.Encoder, reason: str, traceback: bool = False) -> None:
        """Serve the others; groups of this one are counted under the reason."""
        log.warning("graphhal: %s runs eagerly: %s", encoder.name, reason, exc_info=traceback)
        self.refused |= dict.fromkeys(encoder.modalities, reason)


def serving_of(
    model: Any,
    vllm_config: Any,
    settings: Settings,
    platform: Platform,
    device: torch.device,
    dtype: torch.dtype,
) -> Serving:
    """What can be served of a model; what cannot is said aloud, each encoder for itself.

    Args:
        model: unwrapped.
        vllm_config: the engine's configuration.
        settings: merged with vLLM's options.
        platform: of the graphs.
        device: of the graphs.
        dtype: of the model.

    Raises:
        SettingsError: options are invalid.
    """
    try:
        found = towers.encoders_of(model, vllm_config, settings, device, dtype)
    except SettingsError:
        raise
    except AdapterError as error:  # groups are counted under it
        return _none(model, str(error))
    except Exception as error:  # noqa: BLE001  (the model's own code)
        return _none(model, own_code_fails(error), traceback=True)
    serving = Serving()
    if not found:
        return serving
    serving.limit = memory.limit_bytes(vllm_config, model, settings, platform)
    own = settings.model_copy(
        update={
            "memory_limit": serving.limit,
            "warmups": _warmups(settings),
            "max_tokens": most_tokens(settings, vllm_config),
        }
    )
    # vLLM's budgets are for vision; audio graphs have sizes of their own.
    budgets = towers.settings_of(vllm_config).token_budgets
    audio = own.model_copy(update={"token_budgets": budgets})
    peers, group = ranks.sharing(vllm_config, model)
    for encoder in found:
        if encoder.refusal is not None:
            serving.refuse(encoder, encoder.refusal)
            continue
        try:
            served = ServedEncoder(
                encoder, platform, audio if encoder.modalities == ("audio",) else own, peers, group
            )
            # The model's own code may be asked for the first time.
            with vllm_context(vllm_config):
                ladders = [graphs.ladder() for graphs in served.graphs.values()]
            if group is not None and not all(ladders):
                # Ranks that share would always encode, and one without items ask a graph how
                # wide outputs are.
                serving.refuse(encoder, "no graph is asked for")
                continue
            serving.encoders.append(served)
        except GraphhalError as error:
            serving.refuse(encoder, str(error))
        except Exception as error:  # noqa: BLE001  (the model's own code)
            serving.refuse(encoder, own_code_fails(error), traceback=True)
    if not serving.encoders:
        serving.refusal = "; ".join(dict.fromkeys(serving.refused.values()))
    return serving


def _none(model: Any, reason: str, traceback: bool = False) -> Serving:
    log.warning("graphhal: %s runs eagerly: %s", type(model).__name__, reason, exc_info=traceback)
    return Serving(refusal=reason)


def _warmups(settings: Settings) -> int:
    """As many as the operator asks for; else one, as with vLLM's own manager: the towers have
    run before, and a ladder of large graphs takes seconds for each."""
    return settings.warmups if "warmups" in settings.model_fields_set else 1


def vllm_context(vllm_config: Any) -> AbstractContextManager[Any]:
    """The forward context that compiled towers ask for."""
    try:
        from vllm.forward_context import set_forward_context
    except ImportError:
        return nullcontext()
    context: AbstractContextManager[Any] = set_forward_context(None, vllm_config)
    return context
