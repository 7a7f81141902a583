"""Stream capture through PyTorch's CUDA API: the mechanism that cuda and rocm share.

    caller's stream ──●── stage, boundaries, replay, copy out ──●──   a graph runs where launched
                      │ wait for the pool's last use            │ record it
    capture stream ───┴── warm-up, capture, eager calls ────────┴──   one per pool

Facts that decide the shape of this file:

- A replay may be launched on any stream, but graphs of one pool share memory, so every use of the
  pool waits for the one before it. The wait is an event on the device; the host never waits.
- The allocator keeps free blocks per stream. Eager calls therefore run on the capture stream,
  inside the pool, and reuse the memory of the graphs, which are idle meanwhile.
- What an eager call leaves allocated in the pool lies in memory that replays overwrite. Nothing may
  stay there: outputs are allocated outside, and leftovers are looked for before the next step.
- Resetting any graph drops the BLAS workspaces of its capture stream, which the other graphs still
  use. So workspaces are allocated inside the pool, where only ordered work can reuse them.
- Where `cudaStreamEndCapture` fails, PyTorch up to 2.13 leaves its allocators and its random
  generator in capture mode. `_mend` ends that.
- Other versions of PyTorch keep that workspace for good. So a pool without graphs, and its stream,
  go to whoever captures next: one workspace stays behind, not one per owner.
- A pool's `MemPool` must outlive its graphs, also at interpreter exit.
"""

from graphhal.stream_capture.pool import GraphPool
from graphhal.stream_capture.profile import profile
from graphhal.stream_capture.recording import Recording, capture, release, release_all
from graphhal.stream_capture.steps import refused, step

__all__ = [
    "GraphPool",
    "Recording",
    "capture",
    "profile",
    "refused",
    "release",
    "release_all",
    "step",
]
