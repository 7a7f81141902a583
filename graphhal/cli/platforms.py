"""`graphhal platforms`: what was found, why each is or is not usable, which one is active."""

from __future__ import annotations

from typing import Annotated, Any

import typer
from rich.text import Text

from graphhal.cli import screen
from graphhal.discovery import FoundPlugin, find_plugins, open_platform
from graphhal.errors import NoPlatformError, PluginError
from graphhal.platform import PlatformInfo
from graphhal.settings import Settings


def platforms(
    json: Annotated[bool, typer.Option("--json", help="Print JSON instead of a table.")] = False,
) -> None:
    """Show the platform plugins: where each comes from, whether it is usable, which is active."""
    settings = Settings()
    with screen.warnings_of("graphhal.discovery"):
        found = find_plugins(settings)
    active, problem = None, None
    try:
        active = open_platform(settings=settings).info.name
    except (NoPlatformError, PluginError) as error:
        problem = str(error).splitlines()[0]
    if json:
        plugins = [_as_dict(plugin, active) for plugin in found]
        screen.print_json({"active": active, "problem": problem, "platforms": plugins})
        return
    columns = ("platform", "", "status", "device", "versions", "from")
    screen.print_table("platforms", columns, [_row(plugin, active) for plugin in found])
    if active is not None:
        screen.say(f"active: {active}", style="bold green")
    else:
        screen.say(f"no active platform: {problem}", style="bold red")


def _row(plugin: FoundPlugin, active: str | None) -> tuple[str | Text, ...]:
    info = plugin.status if isinstance(plugin.status, PlatformInfo) else None
    versions = (
        ", ".join(f"{name} {version}" for name, version in info.versions.items()) if info else ""
    )
    mark = Text("active", style="bold green") if _is_active(plugin, active) else ""
    return (
        Text(plugin.name, style="bold"),
        mark,
        Text(plugin.describe(), style="" if plugin.usable else "dim"),
        Text(info.device_type if info else ""),
        Text(versions),
        Text(f"{plugin.distribution} {plugin.version}"),
    )


def _is_active(plugin: FoundPlugin, active: str | None) -> bool:
    """Another plugin may be called alike; it was not loaded."""
    return plugin.usable and plugin.name == active


def _as_dict(plugin: FoundPlugin, active: str | None) -> dict[str, Any]:
    data: dict[str, Any] = {
        "name": plugin.name,
        "distribution": plugin.distribution,
        "version": plugin.version,
        "usable": plugin.usable,
        "active": _is_active(plugin, active),
        "status": plugin.describe(),
    }
    if isinstance(plugin.status, PlatformInfo):
        data |= {
            "device_type": plugin.status.device_type,
            "versions": dict(plugin.status.versions),
            "boundary_order": plugin.status.boundary_order,
            "reference": plugin.status.reference,
            "capabilities": sorted(plugin.status.capabilities),
        }
    return data
