"""Inside vllm-ascend: its encoder-graph manager is replaced on opt-in only, its attention reached.

vllm-ascend constructs a subclass of vLLM's manager, so the constructor that `plugin` replaces is
reached there too. Its attention layer copies `cu_seqlens` to the host unless its own manager
captures. Within a forward of graphhal's the ends are known on the host: there the layer hands over
to the platform's attention, and everywhere else it does what it always did.

vllm-ascend sizes the KV cache without asking what graphs take. Where graphhal serves and the cache
has no explicit size, the graphs are captured once before, and what they take is set aside.
"""

import logging
from collections.abc import Mapping
from importlib import import_module
from importlib.metadata import PackageNotFoundError, version
from itertools import chain
from types import MethodType
from typing import Any

import torch

from graphhal.errors import AdapterError, SettingsError
from graphhal.settings import Settings
from graphhal.vllm_worker import compatibility, executor, ranks, towers
from graphhal.vllm_worker.limits import merged
from graphhal.vllm_worker.protocol import has_protocol
from graphhal.vllm_worker.protocol_adapter import ProtocolAdapter
from graphhal.vllm_worker.refusals import own_code_fails
from graphhal.vllm_worker.switch import wants_encoder_graphs
from graphhal.vllm_worker.touched import spelled

log = logging.getLogger(__name__)

PACKAGE = "vllm_ascend"
PLATFORM = "npu"
RELEASES = ("0.26",)
"""Release lines of vllm-ascend that were read."""
ATTENTION = "vllm_ascend.ops.mm_encoder_attention:AscendMMEncoderAttention.forward_oot"
WORKER = "vllm_ascend.worker.worker:NPUWorker.determine_available_memory"
DISPATCHED = "_forward_method"
_MANAGER = "vllm_ascend.worker.encoder_acl_graph"
HOOK_POINTS = {
    ATTENTION: "(self, query, key, value, cu_seqlens=, max_seqlen=, sequence_lengths=)",
    f"{_MANAGER}:EncoderAclGraphManager.__init__": "(self, *args, **kwargs)",
    f"{_MANAGER}:EncoderForwardContext": "fields: token_budget, capturing, cu_seqlens_cpu",
}
"""What must be as it was read, spelled as in `touched`."""
WORKER_HOOK_POINTS = {WORKER: "(self)"}
"""The same, of the module that is watched."""


def build(vllm_config: Any, device: torch.device, dtype: torch.dtype, model: Any) -> Any | None:
    """An executor in place of vllm-ascend's manager; None where that one shall serve.

    Opting in is naming the platform (`platform: npu`), or a model without vLLM's protocol in
    `vllm_models`, which vllm-ascend's manager could not serve.

    Raises:
        SettingsError: options are invalid.
    """
    if not wants_encoder_graphs(vllm_config):
        return None
    reason = _refusal(vllm_config, device, dtype, model)
    if reason is None:
        return executor.build(vllm_config, device, dtype, model)
    return executor.declined(vllm_config, device, dtype, model, reason, "vllm-ascend's")


def _refusal(vllm_config: Any, device: torch.device, dtype: torch.dtype, model: Any) -> str | None:
    settings = towers.settings_of(vllm_config)
    if settings.platform != PLATFORM and has_protocol(model):
        return f"to have graphhal's, set platform to {PLATFORM}"
    problem = hook_point_problem()
    if problem is not None:
        return problem
    problem = _encoders_problem(vllm_config, device, dtype, model, settings)
    if problem is None:
        problem = reach_attention(model)
    return ranks.in_one_voice(ranks.tensor_parallel(), "encoders inside vllm-ascend", problem)


def _encoders_problem(
    vllm_config: Any, device: torch.device, dtype: torch.dtype, model: Any, settings: Settings
) -> str | None:
    limits = merged(settings, vllm_config.compilation_config)
    try:
        found = towers.encoders_of(model, vllm_config, limits, device, dtype)
    except SettingsError:
        raise
    except Exception as error:  # noqa: BLE001  (the model's own code)
        return own_code_fails(error)
    for adapter in chain.from_iterable(encoder.adapters.values() for encoder in found):
        if not isinstance(adapter, ProtocolAdapter):
            continue
        try:
            adapter.keep_ends_on_host()
        except AdapterError as error:
            return str(error)
        except Exception as error:  # noqa: BLE001  (the model's own code)
            return own_code_fails(error)
    return None


def hook_point_problem(hook_points: Mapping[str, str] = HOOK_POINTS) -> str | None:
    """Why this vllm-ascend cannot be served, or None."""
    try:
        installed = version(PACKAGE)
    except PackageNotFoundError:
        installed = "unknown"
    if not installed.startswith(tuple(f"{line}." for line in RELEASES)):
        return f"vllm-ascend {' or '.join(RELEASES)} was expected, found {installed}"
    for name, expected in hook_points.items():
        found = _spelling(name)
        if found != expected:
            return str(compatibility.Drift(name, (expected,), found))
    return None


def _spelling(name: str) -> str:
    try:
        owner, attribute = _resolve(name)
        target = getattr(owner, attribute)
        return spelled(getattr(target, "graphhal_original", target))
    except (ImportError, AttributeError, TypeError, ValueError) as error:
        return f"nothing ({type(error).__name__}: {error})"


def _resolve(name: str) -> tuple[Any, str]:
    module, qualname = name.split(":")
    owner: Any = import_module(module)
    *path, attribute = qualname.split(".")
    for part in path:
        owner = getattr(owner, part)
    return owner, attribute


def reach_attention(model: torch.nn.Module) -> str | None:
    """Let a model's attention layers hand over within graphhal's forwards; why not, or None.

    vLLM's operators look up their method once, when they are made, so it is replaced in each layer.
    """
    owner, _ = _resolve(ATTENTION)
    layers = [module for module in model.modules() if isinstance(module, owner)]
    for layer in layers:
        theirs = getattr(layer, DISPATCHED, None)
        if getattr(theirs, "__func__", None) not in (owner.forward_oot, _handing_over):
            return f"{type(layer).__name__}.{DISPATCHED} was expected to be forward_oot"
    for layer in layers:
        setattr(layer, DISPATCHED, MethodType(_handing_over, layer))
    return None


def _handing_over(
    layer: Any,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    cu_seqlens: torch.Tensor | None = None,
    max_seqlen: torch.Tensor | None = None,
    sequence_lengths: torch.Tensor | None = None,
) -> torch.Tensor:
    """(batch, rows, heads * head_dim) or (batch, rows, heads, head_dim), as the layer's own."""
    from graphhal.npu.attention import attention, ends_are_known

    output: torch.Tensor
    if cu_seqlens is None or not ends_are_known(cu_seqlens):
        output = layer.forward_oot(query, key, value, cu_seqlens, max_seqlen, sequence_lengths)
        return output
    packed = (
        query.reshape(-1, layer.num_heads, layer.head_size),
        key.reshape(-1, layer.num_kv_heads, layer.head_size),
        value.reshape(-1, layer.num_kv_heads, layer.head_size),
    )
    # The bound is for kernels that bake one; fused inference attention takes the ends alone.
    output = attention(*packed, cu_seqlens, 0, float(layer.scale))
    return output.reshape(query.shape).contiguous()  # towers view it; padded heads are strided


def prepare_worker(vllm_config: Any) -> None:
    """Where opted in: let workers set aside what graphs take, before the KV cache. Idempotent."""
    settings = towers.settings_of(vllm_config)
    if settings.platform != PLATFORM and not settings.vllm_models:
        return
    if hook_point_problem() is not None:
        return  # said when the manager is constructed
    problem = hook_point_problem(WORKER_HOOK_POINTS)
    if problem is not None:
        log.warning("graphhal: nothing is set aside for encoder graphs: %s", problem)
        return
    owner, attribute = _resolve(WORKER)
    original = getattr(owner, attribute)
    if hasattr(original, "graphhal_original"):
        return

    def determine_available_memory(self: Any) -> int:
        available = int(original(self))
        if getattr(self.cache_config, "kv_cache_memory_bytes", None):
            return available
        taken = _taken_by_graphs(self)
        log.info("graphhal: %.0f MiB are set aside for encoder graphs", taken / 2**20)
        return max(0, available - taken)

    determine_available_memory.graphhal_original = original  # type: ignore[attr-defined]
    setattr(owner, attribute, determine_available_memory)


def _taken_by_graphs(worker: Any) -> int:
    """Bytes that the graphs of a worker's model take; nothing is kept."""
    from vllm.model_executor.models.interfaces import SupportsEncoderCudaGraph

    config, model = worker.vllm_config, worker.model_runner.get_model()
    if not isinstance(model, SupportsEncoderCudaGraph):
        return 0
    made = build(config, worker.device, config.model_config.dtype, model)
    if not isinstance(made, executor.EncoderGraphExecutor):
        return 0
    return profile_cudagraph_memory(made)


def profile_cudagraph_memory(made: executor.EncoderGraphExecutor) -> int:
    """Bytes that capture takes; the name tells `memory.is_profiling` that this is a profile."""
    before = _settled_free()
    made.capture()
    taken = before - _settled_free()
    made.clear()
    _settled_free()
    return max(0, taken)


def _settled_free() -> int:
    torch.accelerator.synchronize()
    torch.accelerator.empty_cache()
    return int(torch.accelerator.get_memory_info()[0])
