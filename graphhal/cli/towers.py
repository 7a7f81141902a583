"""The options that bench, check and plan share, and the towers that they build from them."""

from __future__ import annotations

from enum import StrEnum
from typing import TYPE_CHECKING, Annotated, Any

import typer

from graphhal.cli.screen import fail, warnings_of
from graphhal.discovery import find_adapters, open_platform
from graphhal.errors import SettingsError
from graphhal.settings import Policy, Settings

if TYPE_CHECKING:
    from collections.abc import Sequence

    import torch

    from graphhal.adapter import AdapterFactory, EncoderAdapter
    from graphhal.platform import Platform


class Preset(StrEnum):
    """Size of a tower."""

    TINY = "tiny"
    FULL = "full"


class Dtype(StrEnum):
    """Data type of weights and outputs."""

    FLOAT32 = "float32"
    BFLOAT16 = "bfloat16"
    FLOAT16 = "float16"


TowerOption = Annotated[
    list[str] | None,
    typer.Option(
        "--tower",
        help="A tower by name (repeatable); by default one of each modality (check: all).",
    ),
]
PresetOption = Annotated[Preset, typer.Option(help="tiny, or full: the published size.")]
PlatformOption = Annotated[
    str | None, typer.Option("--platform", help="A platform; the active one by default.")
]
DtypeOption = Annotated[
    Dtype | None, typer.Option(help="float32 on the reference platform, bfloat16 elsewhere.")
]
PolicyOption = Annotated[Policy | None, typer.Option(help="How groups are spread over graphs.")]
SetOption = Annotated[
    list[str] | None,
    typer.Option(
        "--set", metavar="NAME=VALUE", help="An option of graphhal.Settings (repeatable)."
    ),
]
SeedOption = Annotated[int, typer.Option(min=0, max=2**63 - 1, help="Of the random weights.")]
JsonOption = Annotated[bool, typer.Option("--json", help="Print JSON instead of tables.")]

REFERENCE_LADDER = {
    "token_budgets": "64,128,256,512",
    "audio_chunks": "1-4,6,8,10,12,14,16,18,20,22,24",
    "warmups": 1,
}
"""On the reference platform, which shows behaviour and not speed: a shorter ladder."""


def parse_options(policy: Policy | None, pairs: Sequence[str] | None) -> dict[str, Any]:
    """Options of `--policy` and `--set`.

    Raises:
        SettingsError: a pair has no `=`.
    """
    options: dict[str, Any] = {} if policy is None else {"policy": policy}
    for pair in pairs or ():
        name, equals, value = pair.partition("=")
        if not equals:
            raise SettingsError(f"--set takes NAME=VALUE, got {pair!r}")
        options[name.strip().replace("-", "_")] = value
    return options


def open_with(name: str | None, options: dict[str, Any]) -> tuple[Platform, Settings]:
    """The platform of `--platform`, and settings for it.

    On the reference platform `REFERENCE_LADDER` applies; the environment and `--set` win over it.

    Raises:
        SettingsError: an option is unknown or invalid.
        NoPlatformError: there is no such platform, or it cannot serve this process.
    """
    settings = Settings.from_mapping(options)
    platform = open_platform(name, settings)
    if platform.info.reference:
        given = settings.model_fields_set
        if "max_tokens" in given:
            given = given | {"token_budgets"}
        shorter = {k: v for k, v in REFERENCE_LADDER.items() if k not in given}
        settings = Settings.from_mapping(options | shorter)
    return platform, settings


def choose_towers(
    names: Sequence[str] | None, settings: Settings, every: bool = False
) -> list[AdapterFactory]:
    """The named towers, in their order; by default the first of each modality, or every one."""
    with warnings_of("graphhal.discovery"):
        factories = {factory.name: factory for factory in find_adapters(settings)}
    if not factories:
        raise fail("no tower is installed; graphhal's own come with graphhal[bench]")
    for name in names or ():
        if name not in factories:
            raise fail(f"no tower is called {name!r}. Towers: {', '.join(factories)}", status=2)
    if names:
        return [factories[name] for name in names]
    if every:
        return list(factories.values())
    first: dict[str, AdapterFactory] = {}
    for factory in factories.values():
        first.setdefault(factory.modality, factory)
    return list(first.values())


def build_tower(
    factory: AdapterFactory, preset: Preset, platform: Platform, dtype: Dtype | None, seed: int
) -> EncoderAdapter:
    """A tower with seeded random weights on the platform's device."""
    import torch

    chosen = dtype or (Dtype.FLOAT32 if platform.info.reference else Dtype.BFLOAT16)
    device = torch.device(platform.info.device_type)
    return factory.build(preset.value, device, _torch_dtype(chosen), seed)


def _torch_dtype(dtype: Dtype) -> torch.dtype:
    import torch

    return {
        Dtype.FLOAT32: torch.float32,
        Dtype.BFLOAT16: torch.bfloat16,
        Dtype.FLOAT16: torch.float16,
    }[dtype]
