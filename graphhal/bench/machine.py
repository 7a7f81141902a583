"""Where and how the figures were made, and the JSON document that holds them."""

from __future__ import annotations

import os
import platform as host
from dataclasses import asdict
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version
from typing import TYPE_CHECKING, Any

import torch

import graphhal

if TYPE_CHECKING:
    from collections.abc import Sequence

    from graphhal.bench.measure import TowerResult
    from graphhal.platform import Platform
    from graphhal.settings import Settings


def describe_machine(platform: Platform, settings: Settings, preset: str) -> dict[str, Any]:
    """Platform, device, versions and settings, as plain data."""
    device = _device_name(platform.info.device_type)
    return {
        "summary": f"graphhal {graphhal.__version__}, platform {platform.info.name}, {device}, "
        f"PyTorch {torch.__version__}, preset {preset}, policy {settings.policy}",
        "graphhal": graphhal.__version__,
        "platform": platform.info.name,
        "device": device,
        "preset": preset,
        "versions": {
            "python": host.python_version(),
            "torch": torch.__version__,
            "transformers": _version("transformers"),
            **platform.info.versions,
        },
        "threads": torch.get_num_threads(),
        "settings": settings.model_dump(mode="json"),
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
    }


def as_document(machine: dict[str, Any], results: Sequence[TowerResult]) -> dict[str, Any]:
    """What `graphhal bench --json` prints; `schema` changes when a field changes its meaning."""
    return {
        "schema": 1,
        "machine": machine,
        "agrees": all(result.agrees for result in results),
        "towers": [
            asdict(result)
            | {
                "agrees": result.agrees,
                "inputs": [
                    asdict(line)
                    | {
                        "tokens": line.tokens,
                        "speed_up": line.speed_up,
                        "served": line.served,
                        "padding_waste": line.padding_waste,
                    }
                    for line in result.inputs
                ],
            }
            for result in results
        ],
    }


def _device_name(device_type: str) -> str:
    if device_type == "cuda":
        return str(torch.cuda.get_device_name())
    if device_type == "cpu":
        return f"{os.cpu_count()} CPU cores, {torch.get_num_threads()} threads"
    return device_type


def _version(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return "not installed"
