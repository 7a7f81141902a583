"""Several ranks that serve one encoder: they decide alike, or say which rank differs.

Ranks agree at start-up, never on the request path: what a request does follows from host integers
that every rank has, and from graphs that every rank has. Any number of ranks; one alone costs
nothing and needs no `torch.distributed`.
"""

from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any, TypeVar

from graphhal.errors import PeersError

T = TypeVar("T")

DEFAULT_WAIT = timedelta(minutes=5)
"""How long a rank waits for the others at one agreement; the slowest capture fits well inside."""


class Peers:
    """One rank alone: every agreement is its own opinion.

    Attributes:
        rank: of this process in the group.
        size: ranks in the group.
    """

    rank = 0
    size = 1

    def exchange(self, what: str, value: T) -> list[T]:
        """Every rank's value, by rank. `what` names the agreement in errors."""
        return [value]

    def all_have(self, what: str, value: T, shown: Callable[[T], str] = str) -> T:
        """The value, which must be the same on every rank.

        Raises:
            PeersError: names the ranks that differ, and how; raised on every rank.
        """
        values = self.exchange(what, value)
        for rank, other in enumerate(values):
            if other != values[0]:
                raise PeersError(
                    f"{what}: rank {rank} has {shown(other)}, rank 0 has {shown(values[0])}; "
                    "start every rank with the same model and settings"
                )
        return value

    def first_problem(self, what: str, problem: str | None) -> str | None:
        """What went wrong on any rank, for all ranks alike; None where nothing did."""
        if self.size == 1:
            return problem
        problems = self.exchange(what, problem)
        found = [f"rank {rank}: {text}" for rank, text in enumerate(problems) if text is not None]
        return "; ".join(found) or None


class DistributedPeers(Peers):
    """Ranks of a `torch.distributed` process group on the host (gloo).

    Args:
        group: CPU process group (vLLM: `get_tp_group().cpu_group`).
        wait: how long an agreement may take before it fails with the ranks that are missing.
    """

    def __init__(self, group: Any, wait: timedelta = DEFAULT_WAIT) -> None:
        import torch.distributed as dist

        if dist.get_backend(group) != "gloo":
            raise PeersError(
                f"agreements need a gloo process group, got {dist.get_backend(group)}; "
                "make one with torch.distributed.new_group(backend='gloo')"
            )
        self._group = group
        self._wait = wait
        self.rank = dist.get_rank(group)
        self.size = dist.get_world_size(group)

    def exchange(self, what: str, value: T) -> list[T]:
        """Every rank's value, by rank; values must be picklable.

        Raises:
            PeersError: a rank did not come within the wait; rank 0 names it.
        """
        import torch.distributed as dist

        label = (what, value)
        everyone: list[Any] = [None] * self.size
        try:
            dist.monitored_barrier(self._group, self._wait, wait_all_ranks=True)
            dist.all_gather_object(everyone, label, group=self._group)
        except RuntimeError as error:
            raise PeersError(
                f"rank {self.rank} waited {self._wait} at {what!r} for {self.size} ranks: {error}"
            ) from error
        for rank, (other, _) in enumerate(everyone):
            if other != everyone[0][0]:
                raise PeersError(
                    f"rank {rank} is at {other!r} while rank 0 is at {everyone[0][0]!r}; ranks "
                    "must capture the same keys in the same order"
                )
        return [each for _, each in everyone]


def spread(loads: Sequence[int], ranks: int) -> tuple[tuple[int, ...], ...]:
    """Item indices of each rank, heaviest first onto the least loaded; ascending in a rank.

    Deterministic: every rank computes the same from the same loads. Ranks may get nothing.
    """
    shares: list[list[int]] = [[] for _ in range(ranks)]
    total = [0] * ranks
    for index in sorted(range(len(loads)), key=lambda i: (-loads[i], i)):
        lightest = min(range(ranks), key=lambda r: (total[r], r))
        shares[lightest].append(index)
        total[lightest] += loads[index]
    return tuple(tuple(sorted(share)) for share in shares)
