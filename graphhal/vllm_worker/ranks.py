"""Which ranks of a vLLM engine encode, how they share the work, and that they serve alike."""

from typing import Any

from graphhal.peers import DistributedPeers, Peers


def is_first_stage() -> bool:
    """Whether this is the pipeline's first rank, the only one that encodes."""
    from vllm.distributed.parallel_state import get_pp_group, model_parallel_is_initialized

    return not model_parallel_is_initialized() or bool(get_pp_group().is_first_rank)


def tensor_parallel() -> Peers:
    """The ranks that serve a model together, to agree with."""
    from vllm.distributed.parallel_state import get_tp_group, model_parallel_is_initialized

    if not model_parallel_is_initialized() or get_tp_group().world_size == 1:
        return Peers()
    return DistributedPeers(get_tp_group().cpu_group)


def sharing(vllm_config: Any, model: Any) -> tuple[Peers, Any]:
    """The tensor-parallel ranks: as peers that decide alike, or as a group that shares items.

    A model that does not say that its ranks hold whole towers (`supports_encoder_tp_data`) may have
    split them whatever the mode: ranks with different items would wait for each other inside.
    """
    from vllm.distributed.parallel_state import get_tp_group

    peers = tensor_parallel()
    if peers.size == 1:
        return peers, None
    multimodal = vllm_config.model_config.multimodal_config
    whole = getattr(model, "supports_encoder_tp_data", False) is True
    if whole and getattr(multimodal, "mm_encoder_tp_mode", None) == "data":
        return Peers(), get_tp_group().device_group
    return peers, None


def in_one_voice(peers: Peers, what: str, own: str | None) -> str | None:
    """What this rank says, where all say the same; else what each says that is not None.

    A rank that encodes otherwise than the others would leave them waiting in the first request.

    Raises:
        PeersError: a rank did not come.
    """
    every = peers.exchange(what, own)
    if all(each == own for each in every):
        return own
    return "; ".join(f"rank {rank}: {each}" for rank, each in enumerate(every) if each is not None)
