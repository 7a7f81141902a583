"""Entry points to exactly one active platform, and to the adapters that are installed."""

import inspect
import logging
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from importlib.metadata import EntryPoint, entry_points
from threading import Timer
from typing import TYPE_CHECKING, Any

import pluggy

from graphhal import hookspecs
from graphhal.errors import NoPlatformError, PluginError
from graphhal.hookspecs import PROJECT
from graphhal.platform import Platform, PlatformInfo, Unavailable
from graphhal.settings import Settings

if TYPE_CHECKING:
    from graphhal.adapter import AdapterFactory

log = logging.getLogger(__name__)

PLATFORM_GROUP = "graphhal.platforms"
ADAPTER_GROUP = "graphhal.adapters"
OWN_DISTRIBUTION = "graphhal"
_POSITIONAL = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
_VARIADIC = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
SLOW_SECONDS = 20.0
"""A plugin that takes longer to load or to probe is named while it is waited for."""
_HALF_IMPORTED = "PyTorch cannot be imported, for the reason that a platform before this one has"
_FACTORY_METHODS = ("wrap", "build", "load")
_DEVICE_HOOKS = ("capture", "replay", "update_boundaries", "profile_memory", "release", "step")


@dataclass(frozen=True, slots=True)
class FoundPlugin:
    """An installed plugin and what became of it.

    Attributes:
        name: of its entry point, stripped.
        distribution: that installed it, and its version.
        version: of that distribution.
        status: what the platform says of itself, why it cannot serve, or why it was not loaded.
        plugin: the plugin object; None where it was not loaded.
    """

    name: str
    distribution: str
    version: str
    status: PlatformInfo | Unavailable | str
    plugin: Any = None

    @property
    def usable(self) -> bool:
        """Whether the platform can serve this process."""
        return isinstance(self.status, PlatformInfo)

    def describe(self) -> str:
        """One line: usable, or why not."""
        if isinstance(self.status, Unavailable):
            return f"not usable: {self.status.reason}"
        if isinstance(self.status, str):
            return f"not loaded: {self.status}"
        if self.status.reference:
            return (
                "usable, but never chosen beside an accelerator unless named (reference platform)"
            )
        return "usable"


def find_plugins(settings: Settings | None = None) -> list[FoundPlugin]:
    """Load and probe every platform plugin that may load. Never raises for a third party's fault.

    A plugin that breaks the contract is reported in its status and skipped.
    """
    options = settings or Settings()
    return [_probe(found) for found in _load(PLATFORM_GROUP, options)]


def open_platform(name: str | None = None, settings: Settings | None = None) -> Platform:
    """The one platform that serves this process, its hooks bound.

    Args:
        name: platform to use; by default `GRAPHHAL_PLATFORM`, else the only one that can serve.
            The reference platform (`cpu`) is chosen only where no accelerator is present.

    Raises:
        NoPlatformError: none or several can serve, or the named one cannot; lists what was tried.
        PluginError: the chosen plugin lacks a hook.
    """
    options = settings or Settings()
    wanted = name or options.platform
    found = find_plugins(options)
    chosen = _choose(found, wanted)
    for plugin in found:
        if plugin.plugin is not None:
            log.debug("plugin %s: %s %s", plugin.name, plugin.distribution, plugin.version)
    log.info("platform %s, from %s %s", chosen.name, chosen.distribution, chosen.version)
    return _bind(chosen)


def find_adapters(settings: Settings | None = None) -> "list[AdapterFactory]":
    """The adapters that installed plugins add, graphhal's own first, so that nobody takes the name
    of one or its place; a broken plugin is reported and skipped."""
    factories: dict[str, AdapterFactory] = {}
    plugins = _load(ADAPTER_GROUP, settings or Settings())
    for found in sorted(plugins, key=lambda plugin: plugin.distribution != OWN_DISTRIBUTION):
        if found.plugin is None:
            log.warning("adapters of plugin %s are left out: %s", found.name, found.status)
            continue
        manager = _manager()
        manager.register(found.plugin, found.name)
        try:
            for factory in _offered(manager):
                _add(factory, found.name, factories)
        except (Exception, SystemExit) as error:  # a third party's code: report it
            log.warning(
                "adapters of plugin %s are left out: %s", found.name, _told(error), exc_info=True
            )
    return list(factories.values())


def _told(error: BaseException) -> str:
    """A third party's error for one line: `3` or `x` alone would say nothing."""
    return f"{type(error).__name__}: {error}"


def _offered(manager: pluggy.PluginManager) -> "Sequence[AdapterFactory]":
    answers: list[Sequence[AdapterFactory]] = manager.hook.graphhal_adapters()
    if not answers:  # pluggy leaves out what is None
        raise PluginError("graphhal_adapters returned None, or is not there; return the factories")
    return answers[0]


def _add(factory: Any, plugin: str, factories: "dict[str, AdapterFactory]") -> None:
    name: Any = getattr(factory, "name", None)
    modality = getattr(factory, "modality", None)
    problem = None
    if not isinstance(name, str):
        problem = "a name is a word"
    elif not isinstance(modality, str):
        problem = f"a modality is a word, 'image' or 'audio', not {modality!r}"
    elif isinstance(factory, type):
        problem = "it is a class; return an object of it"
    elif lacking := [each for each in _FACTORY_METHODS if not callable(getattr(factory, each, 0))]:
        problem = f"it has no method {lacking[0]}"
    elif name in factories:
        problem = "the name is taken"
    if problem is None:
        factories[name] = factory
    else:
        log.warning("adapter %s of plugin %s is left out: %s", name or factory, plugin, problem)


def bind(plugin: Any, info: PlatformInfo, name: str = "plugin") -> Platform:
    """A plugin object's hooks as a `Platform`; what `open_platform` does with the chosen one.

    Raises:
        PluginError: a hook is misspelt, missing, or takes an argument its spec does not have.
    """
    verify(plugin, name)
    return Platform(info=info, **_bind_hooks(plugin, name))


def verify(plugin: Any, name: str) -> None:
    """Refuse a plugin that does not follow the hookspecs.

    Raises:
        PluginError: names the plugin, the hook and the argument.
    """
    known = {hook for hook in vars(hookspecs) if hook.startswith(f"{PROJECT}_")}
    offered = [attribute for attribute in dir(plugin) if attribute.startswith(f"{PROJECT}_")]
    for attribute in offered:
        if attribute not in known:
            raise PluginError(
                f"plugin {name!r}: {attribute} is no hook of graphhal. Hooks: "
                f"{', '.join(sorted(known))}"
            )
        options = getattr(getattr(plugin, attribute), f"{PROJECT}_impl", None)
        if options is None:
            raise PluginError(
                f"plugin {name!r}: hook {attribute} is not marked; put @graphhal.hookimpl above it"
            )
        if options["wrapper"] or options["hookwrapper"]:
            raise PluginError(
                f"plugin {name!r}: hook {attribute} is a wrapper; graphhal calls one "
                "implementation and nothing around it"
            )
    if not offered:
        raise PluginError(f"plugin {name!r} implements no hook of graphhal")
    manager = _manager()
    try:
        manager.register(plugin, name)
        manager.check_pending()
    except pluggy.PluginValidationError as error:
        raise PluginError(f"plugin {name!r}: {error}") from error


def _manager() -> pluggy.PluginManager:
    manager = pluggy.PluginManager(PROJECT)
    manager.add_hookspecs(hookspecs)
    return manager


def _load(group: str, settings: Settings) -> Iterator[FoundPlugin]:
    """Every plugin of a group, loaded where it may be and follows the contract.

    Of several that are called alike, graphhal's own is the one; else the first on the path.
    """
    # Each look reads the metadata of every distribution that is installed.
    installed = {each: entry_points(group=each) for each in (PLATFORM_GROUP, ADAPTER_GROUP)}
    points = sorted(installed[group], key=lambda p: (p.name.strip(), not _is_own(p)))
    names = {point.name.strip() for each in installed.values() for point in each}
    _report_unknown_names(settings, names)
    seen: set[str] = set()
    for point in points:
        name = point.name.strip()
        dist = point.dist
        origin = (dist.name, dist.version) if dist is not None else ("unknown", "unknown")
        refusal = _refusal(name, origin[0], settings)
        if name in seen:
            refusal = f"another plugin is already called {name}"
        seen.add(name)
        if refusal is not None:
            yield FoundPlugin(name, *origin, refusal)
            continue
        try:
            with _named_if_slow("loading", name):
                plugin = point.load()
            verify(plugin, name)
            if group == PLATFORM_GROUP:
                _bind_hooks(plugin, name)
        except (Exception, SystemExit) as error:  # noqa: BLE001  (a third party's code: report it)
            log.warning("plugin %s (%s %s) is skipped: %s", name, *origin, _told(error))
            yield FoundPlugin(name, *origin, _told(error))
            continue
        yield FoundPlugin(name, *origin, "loaded", plugin)


@contextmanager
def _named_if_slow(doing: str, name: str) -> Iterator[None]:
    """Devices open in the thread that uses them: a plugin that hangs is waited for, but named."""
    told = (
        "%s plugin %s takes more than %g s; GRAPHHAL_BLOCK_PLUGINS=%s leaves it out",
        doing,
        name,
        SLOW_SECONDS,
        name,
    )
    timer = Timer(SLOW_SECONDS, log.warning, told)
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()
        timer.join()  # a process that forks next has one thread less


def _is_own(point: EntryPoint) -> bool:
    return point.dist is not None and point.dist.name == OWN_DISTRIBUTION


def _refusal(name: str, distribution: str, settings: Settings) -> str | None:
    if name in settings.block_plugins:
        return "blocked by GRAPHHAL_BLOCK_PLUGINS"
    third_party = distribution != OWN_DISTRIBUTION
    if third_party and settings.plugins is not None and name not in settings.plugins:
        return "not in GRAPHHAL_PLUGINS"
    return None


def _report_unknown_names(settings: Settings, names: set[str]) -> None:
    for option, given in (
        ("GRAPHHAL_PLUGINS", settings.plugins or ()),
        ("GRAPHHAL_BLOCK_PLUGINS", settings.block_plugins),
    ):
        unknown = [name for name in given if name not in names]
        if unknown:
            log.warning(
                "%s names %s, which is not installed. Installed: %s",
                option,
                ", ".join(unknown),
                ", ".join(sorted(names)),
            )


def _pytorch_is_half_imported() -> bool:
    """Whether an import of PyTorch failed, as where a device's extension lacks its libraries: the
    next one would fail for another reason, and the process would crash."""
    return "torch" not in sys.modules and any(name.startswith("torch.") for name in sys.modules)


def _probe(found: FoundPlugin) -> FoundPlugin:
    if found.plugin is None:
        return found
    status: Any
    try:
        with _named_if_slow("probing", found.name):
            half = _pytorch_is_half_imported()
            status = Unavailable(_HALF_IMPORTED) if half else found.plugin.graphhal_probe()
    except (Exception, SystemExit) as error:  # a third party's code: report it and go on
        log.warning("probing plugin %s failed", found.name, exc_info=True)
        because = "" if error.__cause__ is None else f" ({error.__cause__})"
        # Nobody knows whether its device is here; a broken plugin keeps no other from serving.
        status = Unavailable(f"its probe failed with {_told(error)}{because}", absent=True)
    if isinstance(status, PlatformInfo) and status.name != found.name:
        status = f"it calls itself {status.name!r}; an entry point carries the platform's name"
    elif not isinstance(status, PlatformInfo | Unavailable):
        status = f"graphhal_probe returned {status!r}, not a PlatformInfo or Unavailable"
    if isinstance(status, str):
        log.warning("plugin %s is skipped: %s", found.name, status)
        return replace(found, status=status, plugin=None)
    return replace(found, status=status)


def _choose(found: Sequence[FoundPlugin], wanted: str | None) -> FoundPlugin:
    if wanted is not None:
        for plugin in found:
            if plugin.name == wanted.strip() and plugin.usable:
                return plugin
        problem = f"platform {wanted!r} cannot serve this process."
        if all(plugin.name != wanted.strip() for plugin in found):
            names = ", ".join(plugin.name for plugin in found) or "none is installed"
            problem = f"no platform is called {wanted!r}. Platforms: {names}."
        raise NoPlatformError(_tried(found, problem))
    usable = [plugin for plugin in found if plugin.usable]
    devices = [plugin for plugin in usable if not _info(plugin).reference]
    if len(devices) == 1:
        return devices[0]
    if len(devices) > 1:
        names = " and ".join(plugin.name for plugin in devices)
        raise NoPlatformError(
            _tried(found, f"{names} can all serve this process; exactly one must.")
        )
    if len(usable) > 1:
        names = " and ".join(plugin.name for plugin in usable)
        raise NoPlatformError(_tried(found, f"{names} are all reference platforms; name one."))
    if usable and not _accelerator_present(found):
        return usable[0]
    raise NoPlatformError(_tried(found, "0 platforms can serve this process; exactly one must."))


def _accelerator_present(found: Iterable[FoundPlugin]) -> bool:
    """Whether this machine has an accelerator, usable or not."""
    import torch

    return torch.accelerator.is_available() or any(
        isinstance(plugin.status, Unavailable) and not plugin.status.absent for plugin in found
    )


def _info(plugin: FoundPlugin) -> PlatformInfo:
    if not isinstance(plugin.status, PlatformInfo):
        raise PluginError(f"plugin {plugin.name!r} is {plugin.describe()}")
    return plugin.status


def _tried(found: Sequence[FoundPlugin], headline: str) -> str:
    width = max((len(plugin.name) for plugin in found), default=0)
    lines = [f"  {plugin.name:<{width}}  {plugin.describe()}" for plugin in found]
    way_out = (
        "Fix what the line of your device says, or set GRAPHHAL_PLATFORM to one name above "
        "(cpu is the reference: correct, not fast)."
    )
    return "\n".join([headline, *lines, way_out])


def _bind(found: FoundPlugin) -> Platform:
    return bind(found.plugin, _info(found), found.name)


def _bind_hooks(plugin: Any, name: str) -> dict[str, Any]:
    """The implementations of a platform's hooks, by their name in `Platform`."""
    if not hasattr(plugin, "graphhal_probe"):
        raise PluginError(f"plugin {name!r} lacks the hook graphhal_probe, which a platform needs")
    return {hook: _bound(plugin, f"graphhal_{hook}", name) for hook in _DEVICE_HOOKS}


def _bound(plugin: Any, hook: str, name: str) -> Callable[..., Any]:
    """The plugin's implementation of a hook, taking all of the spec's arguments by position."""
    implementation = getattr(plugin, hook, None)
    if implementation is None:
        raise PluginError(f"plugin {name!r} lacks the hook {hook}, which a platform needs")
    if inspect.isgeneratorfunction(implementation) or inspect.iscoroutinefunction(implementation):
        raise PluginError(
            f"plugin {name!r}: hook {hook} yields or awaits, and would not run when it is called; "
            "return the answer, or put @contextlib.contextmanager below @graphhal.hookimpl"
        )
    asked = list(inspect.signature(getattr(hookspecs, hook)).parameters)
    signature = inspect.signature(implementation)
    parameters = signature.parameters.values()
    taken = [parameter.name for parameter in parameters if parameter.name in asked]
    first = [parameter.name for parameter in parameters if parameter.kind in _POSITIONAL]
    if first[: len(taken)] != taken:
        raise PluginError(
            f"plugin {name!r}: hook {hook} takes {signature}; arguments of "
            f"the hook, {', '.join(taken)}, come first and by position"
        )
    if not taken and any(parameter.kind in _VARIADIC for parameter in parameters):
        raise PluginError(
            f"plugin {name!r}: hook {hook} takes {signature}, which names none of its arguments, "
            f"{', '.join(asked)}; name them (functools.wraps keeps those of a decorated function)"
        )
    if taken == asked:
        return implementation  # type: ignore[no-any-return]
    positions = [asked.index(argument) for argument in taken]
    if len(positions) == 1:  # the usual case, kept cheap
        (only,) = positions
        return lambda *arguments: implementation(arguments[only])
    return lambda *arguments: implementation(*[arguments[position] for position in positions])
