"""Device graphs for multimodal encoders: one engine, one plugin contract, every accelerator.

Importing graphhal loads no device library, PyTorch included; each name below is fetched on use.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from graphhal import testing
    from graphhal.boundaries import Boundaries
    from graphhal.discovery import open_platform
    from graphhal.hookspecs import hookimpl, hookspec
    from graphhal.runner import EncoderGraphs
    from graphhal.settings import Settings

__version__ = "0.1.0"

__all__ = [
    "Boundaries",
    "EncoderGraphs",
    "Settings",
    "__version__",
    "hookimpl",
    "hookspec",
    "open_platform",
    "testing",
]

_HOMES = {
    "Boundaries": "boundaries",
    "EncoderGraphs": "runner",
    "Settings": "settings",
    "hookimpl": "hookspecs",
    "hookspec": "hookspecs",
    "open_platform": "discovery",
}


def __getattr__(name: str) -> Any:
    if name == "testing":
        return import_module("graphhal.testing")
    if name not in _HOMES:
        raise AttributeError(f"module 'graphhal' has no attribute {name!r}")
    value = getattr(import_module(f"graphhal.{_HOMES[name]}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
