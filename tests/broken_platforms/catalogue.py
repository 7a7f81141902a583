"""All the faults."""

from tests.broken_platforms import (
    boundary_faults,
    capture_faults,
    contract_faults,
    memory_faults,
    ownership_faults,
    replay_faults,
)
from tests.broken_platforms.fault import FAULTS, Fault

__all__ = [
    "FAULTS",
    "Fault",
    "boundary_faults",
    "capture_faults",
    "contract_faults",
    "memory_faults",
    "ownership_faults",
    "replay_faults",
]
