"""Platform rocm's own code on an NVIDIA device, AITER replaced by a strict stand-in.

    python -m graphhal.testing --plugin benchmarks.rocm_stand_in      # from the repository's root

For checks only: it shows that the code of `graphhal.rocm` keeps the contract through the API that
PyTorch shares between CUDA and HIP, and says nothing of an AMD device, its runtime or AITER.
Imports no device library, as every plugin.
"""

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from graphhal.hookspecs import hookimpl
from graphhal.platform import PlatformInfo, Unavailable
from graphhal.rocm.plugin import (
    graphhal_capture,
    graphhal_profile_memory,
    graphhal_release,
    graphhal_replay,
    graphhal_step,
    graphhal_update_boundaries,
)

if TYPE_CHECKING:
    import torch

LABEL = "strict stand-in over FlashAttention; no AMD device"


class StrictAiter:
    """What AITER's attention is at its strictest.

    Workspaces are looked up by stream and never made during capture; an empty sequence is an
    error, or NaN where it only shows on the device; rows past the last end stay NaN.

    Args:
        kernel: attention of `query, key, value, cu_seqlens, max_seqlen, scale` that computes for
            it; by default PyTorch's FlashAttention.
    """

    def __init__(self, kernel: Callable[..., "torch.Tensor"] | None = None) -> None:
        if kernel is None:
            from graphhal.cuda.attention import flash_kernel

            kernel = flash_kernel()
        self.kernel = kernel
        self.workspaces: dict[int, torch.Tensor] = {}

    def __call__(
        self,
        q: "torch.Tensor",
        k: "torch.Tensor",
        v: "torch.Tensor",
        cu_seqlens_q: "torch.Tensor",
        cu_seqlens_k: "torch.Tensor",
        max_seqlen_q: int,
        max_seqlen_k: int,
        dropout_p: float = 0.0,
        softmax_scale: float = 1.0,
        causal: bool = False,
    ) -> "torch.Tensor":
        import torch

        stream = torch.cuda.current_stream().stream_id
        capturing = torch.cuda.is_current_stream_capturing()
        if stream not in self.workspaces:
            if capturing:
                raise RuntimeError("no workspace: this stream never ran the kernel")
            with torch.inference_mode(False):  # the next call may be outside inference mode
                self.workspaces[stream] = torch.zeros(4096, device=q.device)
        self.workspaces[stream].add_(1)
        if not capturing and min(cu_seqlens_q.diff().tolist()) <= 0:
            raise ValueError("an empty sequence")
        written = self.kernel(q, k, v, cu_seqlens_q, max_seqlen_q, softmax_scale)
        rows = torch.arange(len(q), device=q.device)
        bad = (rows >= cu_seqlens_q[-1]) | (cu_seqlens_q.diff() <= 0).any()
        return written.masked_fill(bad[:, None, None], float("nan"))


@hookimpl
def graphhal_probe() -> PlatformInfo | Unavailable:
    """Usable on an NVIDIA device; its versions say that it is a stand-in."""
    import torch

    if torch.version.cuda is None or not torch.cuda.is_available():
        return Unavailable("the stand-in for AITER needs an NVIDIA device", absent=True)
    from graphhal.rocm.attention import PackedAttention
    from graphhal.rocm.memory import free_bytes

    versions: dict[str, Any] = {
        "torch": str(torch.__version__),
        "cuda": str(torch.version.cuda),
        "aiter": LABEL,
        "device": torch.cuda.get_device_name(),
    }
    return PlatformInfo(
        name="rocm",
        device_type="cuda",
        versions=versions,
        attention=PackedAttention(StrictAiter()),
        free_bytes=free_bytes,
        allow_empty=False,
        capabilities=frozenset({"mem_pool_eager", "no_empty_sequences", "poison"}),
    )


__all__ = [
    "StrictAiter",
    "graphhal_capture",
    "graphhal_probe",
    "graphhal_profile_memory",
    "graphhal_release",
    "graphhal_replay",
    "graphhal_step",
    "graphhal_update_boundaries",
]
