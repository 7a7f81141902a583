"""What a hook costs per replay: the bound implementation, against a plain method and pluggy's call.

Prints nanoseconds per call (the best of many rounds, the empty loop taken off). Goal: a bound hook
costs at most 0.2 µs over a plain method.

    python benchmarks/hook_cost.py
"""

import sys
from timeit import Timer

import pluggy

from graphhal import hookimpl, hookspecs
from graphhal.discovery import bind
from graphhal.platform import PlatformInfo

GOAL_NS = 200.0
CALLS = 5_000
ROUNDS = 400


class Plugin:
    """A platform whose hooks do nothing."""

    @hookimpl
    def graphhal_probe(self):
        """Not called."""

    @hookimpl
    def graphhal_capture(self, request):
        """Not called."""

    @hookimpl
    def graphhal_replay(self, graph):
        """Timed."""

    @hookimpl
    def graphhal_update_boundaries(self, boundaries):
        """Timed; takes fewer arguments than its hook has."""

    @hookimpl
    def graphhal_step(self, kind, graph, inputs, boundaries):
        """Timed."""

    @hookimpl
    def graphhal_profile_memory(self, requests):
        """Not called."""

    @hookimpl
    def graphhal_release(self, graphs):
        """Not called."""


def nanoseconds(statement: str, **names: object) -> float:
    """Best time of one call, the loop itself taken off."""
    timed = min(Timer(statement, globals=names).repeat(ROUNDS, CALLS))
    empty = min(Timer("pass").repeat(ROUNDS, CALLS))
    return (timed - empty) / CALLS * 1e9


def main() -> int:
    plugin = Plugin()
    info = PlatformInfo("nothing", "cpu", {}, attention=None)  # type: ignore[arg-type]
    platform = bind(plugin, info)
    manager = pluggy.PluginManager(hookspecs.PROJECT)
    manager.add_hookspecs(hookspecs)
    for name in ("first", "second", "third", "fourth"):
        manager.register(Plugin() if name != "first" else plugin, name)
    plain = nanoseconds("plugin.graphhal_replay(None)", plugin=plugin)
    rows = [
        ("plain method, replay(graph)", plain),
        ("bound hook, replay(graph)", nanoseconds("platform.replay(None)", platform=platform)),
        (
            "bound hook with fewer arguments, update_boundaries(boundaries)",
            nanoseconds("platform.update_boundaries(None, None)", platform=platform),
        ),
        (
            "bound hook, step(kind, graph, inputs, boundaries)",
            nanoseconds("platform.step('replay', None, None, None)", platform=platform),
        ),
        (
            "pluggy's call through four plugins, replay(graph)",
            nanoseconds("hook.graphhal_replay(graph=None)", hook=manager.hook),
        ),
    ]
    for what, cost in rows:
        print(f"{cost:8.0f} ns  {cost - plain:+8.0f} ns  {what}")
    worst = max(cost for what, cost in rows if what.startswith("bound")) - plain
    print(f"bound hooks cost at most {worst:.0f} ns over a plain method (goal {GOAL_NS:.0f} ns)")
    return int(worst > GOAL_NS)


if __name__ == "__main__":
    sys.exit(main())
