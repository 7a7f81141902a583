"""Entry points to exactly one platform: what plugins get wrong, and what an operator decides."""

import json
import logging
import os
import subprocess
import sys
import textwrap
import time
from pathlib import Path

import pytest
import torch

from graphhal import discovery, hookimpl
from graphhal.discovery import bind, find_adapters, find_plugins, open_platform, verify
from graphhal.errors import NoPlatformError, PluginError
from graphhal.settings import Settings
from tests.plain_platform import PLAIN, PlainPlugin

HOOKS = """
@hookimpl
def graphhal_capture(request): touched("capture")

@hookimpl
def graphhal_replay(graph): touched("replay")

@hookimpl
def graphhal_update_boundaries(graph, boundaries): touched("update_boundaries")

@hookimpl
def graphhal_step(kind, graph, inputs, boundaries): touched("step")

@hookimpl
def graphhal_profile_memory(requests): touched("profile_memory")

@hookimpl
def graphhal_release(graphs): touched("release")
"""
HEAD = """
from graphhal import hookimpl
from graphhal.platform import PlatformInfo, Unavailable

touches = []

def touched(hook):
    touches.append(hook)
    raise AssertionError(f"device hook {hook} of a plugin that was not chosen")

def info(name, reference=False):
    return PlatformInfo(name, device_type="x", versions={}, attention=None, reference=reference)
"""


def platform_source(probe: str, hooks: str = HOOKS) -> str:
    body = textwrap.indent(textwrap.dedent(probe).strip(), "    ")
    return f"{HEAD}\n@hookimpl\ndef graphhal_probe():\n{body}\n{hooks}"


def usable(name: str, reference: bool = False) -> str:
    return platform_source(f"return info({name!r}, {reference})")


class Site:
    """A folder of installed distributions; the real graphhal is hidden behind an empty one."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.serial = 0

    def install(
        self,
        distribution: str,
        plugins: dict[str, str],
        group: str = "graphhal.platforms",
        version: str = "1.2.3",
    ) -> None:
        lines = [f"[{group}]"]
        for name, source in plugins.items():
            self.serial += 1
            module = f"fake_{self.path.name}_{self.serial}"
            (self.path / f"{module}.py").write_text(source)
            lines.append(f"{name} = {module}")
        info = self.path / f"{distribution.replace('-', '_')}-{version}.dist-info"
        info.mkdir()
        (info / "METADATA").write_text(
            f"Metadata-Version: 2.1\nName: {distribution}\nVersion: {version}\n"
        )
        (info / "entry_points.txt").write_text("\n".join(lines) + "\n")


@pytest.fixture
def site(tmp_path, monkeypatch):
    for name in list(os.environ):
        if name.startswith("GRAPHHAL_"):
            monkeypatch.delenv(name)
    monkeypatch.syspath_prepend(str(tmp_path))
    yield Site(tmp_path)
    for module in [m for m in sys.modules if m.startswith(f"fake_{tmp_path.name}")]:
        del sys.modules[module]


@pytest.fixture
def no_own_platforms(site):
    site.install("graphhal", {})
    return site


def lines(settings: Settings | None = None) -> dict[str, str]:
    return {plugin.name: plugin.describe() for plugin in find_plugins(settings)}


# Plugins that break the contract -------------------------------------------------------------

BROKEN = {
    "missing": ("import no_such_library_at_all", "ModuleNotFoundError: No module named"),
    "syntax": ("def (:", "SyntaxError"),
    "leaves": ("raise SystemExit(3)", "SystemExit: 3"),
    "empty": ("", "implements no hook of graphhal"),
    "misspelt": (
        usable("misspelt").replace("graphhal_replay", "graphhal_repaly"),
        "graphhal_repaly is no hook of graphhal. Hooks: graphhal_adapters, graphhal_capture",
    ),
    "unmarked": (
        usable("unmarked").replace("@hookimpl\ndef graphhal_replay", "def graphhal_replay"),
        "hook graphhal_replay is not marked",
    ),
    "argument": (
        usable("argument").replace("graphhal_replay(graph)", "graphhal_replay(graph, stream)"),
        "{'stream'}",
    ),
    "wrapping": (
        usable("wrapping").replace(
            '@hookimpl\ndef graphhal_replay(graph): touched("replay")',
            "@hookimpl(wrapper=True)\ndef graphhal_replay(graph):\n    return (yield)",
        ),
        "hook graphhal_replay is a wrapper",
    ),
    "keyword": (
        usable("keyword").replace("graphhal_replay(graph)", "graphhal_replay(*, graph)"),
        "hook graphhal_replay takes (*, graph); arguments of the hook, graph, come first",
    ),
    "yielding": (
        usable("yielding").replace("def graphhal_step", "def graphhal_step(kind): yield 1\ndef _s"),
        "hook graphhal_step yields or awaits, and would not run when it is called",
    ),
    "waiting": (
        usable("waiting").replace("def graphhal_replay", "async def graphhal_replay"),
        "hook graphhal_replay yields or awaits",
    ),
    "decorated": (
        usable("decorated").replace("graphhal_replay(graph)", "graphhal_replay(*args, **kwargs)"),
        "hook graphhal_replay takes (*args, **kwargs), which names none of its arguments, graph",
    ),
    "lacking": (
        usable("lacking").replace("@hookimpl\ndef graphhal_step", "def _step"),
        "lacks the hook graphhal_step",
    ),
    "probeless": (
        usable("probeless").replace("@hookimpl\ndef graphhal_probe", "def _probe"),
        "lacks the hook graphhal_probe",
    ),
    "raising": (
        platform_source("raise OSError('libdevice.so: no such file')"),
        "not usable: its probe failed with OSError: libdevice.so: no such file",
    ),
    "leaving": (
        platform_source("raise SystemExit('bye')"),
        "its probe failed with SystemExit: bye",
    ),
    "junk": (
        platform_source("return {'name': 'junk'}"),
        "graphhal_probe returned {'name': 'junk'}",
    ),
    "silent": (platform_source("pass"), "graphhal_probe returned None"),
    "words": (platform_source("return 'usable'"), "graphhal_probe returned 'usable'"),
    "ordered": (
        platform_source("return PlatformInfo('ordered', 'x', {}, None, 'sideways')"),
        "PlatformInfo.boundary_order must be 'before' or 'after', got 'sideways'",
    ),
    "typeless": (
        platform_source("return PlatformInfo('typeless', None, {}, None)"),
        "PlatformInfo.device_type must be a word, got None",
    ),
    "unversioned": (
        platform_source("return PlatformInfo('unversioned', 'x', None, None)"),
        "PlatformInfo.versions must be a mapping, got None",
    ),
    "inattentive": (
        platform_source("return PlatformInfo('inattentive', 'x', {}, 'flash')"),
        "PlatformInfo.attention must be a function or None, got 'flash'",
    ),
    "capable": (
        platform_source("return PlatformInfo('capable', 'x', {}, None, capabilities='poison')"),
        "PlatformInfo.capabilities must be a set of words, got 'poison'",
    ),
    "lonely": (
        platform_source("return PlatformInfo('lonely', 'x', {}, None, lone_sequence_from=0)"),
        "PlatformInfo.lone_sequence_from must be a number of rows or None, got 0",
    ),
    "renamed": (usable("other"), "it calls itself 'other'"),
}


@pytest.mark.parametrize("name", BROKEN)
def test_a_broken_plugin_is_reported_and_the_others_serve(no_own_platforms, name, caplog):
    source, words = BROKEN[name]
    no_own_platforms.install("vendor-broken", {name: source}, version="4.5")
    no_own_platforms.install("vendor-good", {"good": usable("good")})
    found = lines()
    assert words in found[name]
    assert found["good"] == "usable"
    assert f"plugin {name}" in caplog.text
    assert open_platform().info.name == "good"
    with pytest.raises(NoPlatformError, match=rf"^platform '{name}' cannot serve this process\."):
        open_platform(name)


def test_a_plugin_object_is_verified_like_a_module():
    class Misspelt:
        @hookimpl
        def graphhal_replya(self, graph):
            """Typo."""

    with pytest.raises(PluginError, match=r"^plugin 'x': graphhal_replya is no hook of graphhal"):
        verify(Misspelt(), "x")
    with pytest.raises(PluginError, match=r"^plugin 'x' implements no hook of graphhal"):
        verify(object(), "x")

    class OwnPrefix:
        graphhal_setting = 3

    with pytest.raises(PluginError, match=r"^plugin 'x': graphhal_setting is no hook"):
        verify(OwnPrefix(), "x")


# Exactly one ---------------------------------------------------------------------------------


def test_nothing_installed_lists_nothing_and_says_what_to_do(no_own_platforms):
    with pytest.raises(NoPlatformError, match=r"^0 platforms can serve this process; exactly one"):
        open_platform()


def test_one_usable_device_serves_and_is_named_with_its_distribution(no_own_platforms, caplog):
    no_own_platforms.install("vendor-x", {"x": usable("x")}, version="7.0.1")
    with caplog.at_level(logging.INFO):
        assert open_platform().info.name == "x"
    assert "platform x, from vendor-x 7.0.1" in caplog.text


def test_two_usable_devices_are_an_error_that_lists_all(no_own_platforms):
    no_own_platforms.install("vendor-x", {"x": usable("x"), "y": usable("y")})
    no_own_platforms.install(
        "vendor-z", {"z": platform_source("return Unavailable('driver too old')")}
    )
    with pytest.raises(NoPlatformError) as caught:
        open_platform()
    message = str(caught.value)
    assert message.startswith("x and y can all serve this process; exactly one must.")
    assert "  z  not usable: driver too old" in message
    assert "GRAPHHAL_PLATFORM" in message
    assert open_platform("y").info.name == "y"
    assert open_platform(settings=Settings(platform="x")).info.name == "x"
    assert open_platform(" y ", Settings(platform="x")).info.name == "y"


def test_a_named_platform_that_cannot_serve_is_never_replaced(no_own_platforms, monkeypatch):
    no_own_platforms.install(
        "vendor-x",
        {"x": platform_source("return Unavailable('no device')"), "y": usable("y")},
    )
    monkeypatch.setenv("GRAPHHAL_PLATFORM", "x")
    with pytest.raises(NoPlatformError) as caught:
        open_platform()
    assert str(caught.value).startswith("platform 'x' cannot serve this process.")
    assert "not usable: no device" in str(caught.value)
    with pytest.raises(NoPlatformError, match=r"^no platform is called 'typo'\. Platforms: x, y\."):
        open_platform("typo")
    monkeypatch.setenv("GRAPHHAL_PLATFORM", "")
    assert open_platform().info.name == "y"


def test_the_reference_serves_where_there_is_no_accelerator(site):
    site.install("graphhal", {"cpu": usable("cpu", reference=True)})
    site.install("vendor", {"x": platform_source("return Unavailable('no x here', absent=True)")})
    assert open_platform().info.name == "cpu"


def test_the_reference_is_never_chosen_beside_a_device(site):
    site.install("graphhal", {"cpu": usable("cpu", reference=True)})
    site.install("vendor", {"x": usable("x")})
    assert open_platform().info.name == "x"
    assert open_platform("cpu").info.name == "cpu"


def test_the_reference_is_never_chosen_silently_beside_an_unusable_device(site):
    site.install("graphhal", {"cpu": usable("cpu", reference=True)})
    site.install("vendor", {"x": platform_source("return Unavailable('driver too old')")})
    with pytest.raises(NoPlatformError) as caught:
        open_platform()
    message = str(caught.value)
    assert message.startswith("0 platforms can serve this process; exactly one must.")
    assert "x    not usable: driver too old" in message
    assert "never chosen beside an accelerator unless named" in message
    assert open_platform("cpu").info.name == "cpu"


def test_a_broken_plugin_keeps_the_reference_from_nothing(site):
    site.install("graphhal", {"cpu": usable("cpu", reference=True)})
    site.install("vendor-broken", {name: source for name, (source, _) in BROKEN.items()})
    assert open_platform().info.name == "cpu"


def test_the_reference_is_never_chosen_beside_a_device_that_only_pytorch_knows(site, monkeypatch):
    site.install("graphhal", {"cpu": usable("cpu", reference=True)})
    monkeypatch.setattr(torch.accelerator, "is_available", lambda: True)
    with pytest.raises(NoPlatformError, match=r"^0 platforms can serve"):
        open_platform()
    assert open_platform("cpu").info.name == "cpu"


def test_two_references_must_be_told_apart(site):
    site.install("graphhal", {"cpu": usable("cpu", reference=True)})
    site.install("vendor", {"other": usable("other", reference=True)})
    with pytest.raises(NoPlatformError, match=r"^cpu and other are all reference platforms"):
        open_platform()


def test_nobody_takes_the_name_of_an_own_platform(site, monkeypatch):
    site.install("graphhal", {"cpu": usable("cpu", reference=True)})
    earlier = Site(site.path / f"{site.path.name}_earlier")
    earlier.path.mkdir()
    earlier.install("vendor", {"cpu": usable("cpu")})
    monkeypatch.syspath_prepend(str(earlier.path))
    own, other = find_plugins()
    assert (own.distribution, own.describe()[:6]) == ("graphhal", "usable")
    assert (other.distribution, other.describe()) == (
        "vendor",
        "not loaded: another plugin is already called cpu",
    )


def test_names_are_stripped(no_own_platforms):
    no_own_platforms.install("vendor", {"  x ": usable("x")})
    assert [plugin.name for plugin in find_plugins()] == ["x"]
    assert open_platform("x").info.name == "x"


def test_device_hooks_of_plugins_that_were_not_chosen_never_run(no_own_platforms):
    no_own_platforms.install("vendor", {"x": usable("x"), "y": usable("y")})
    platform = open_platform("x")
    assert [plugin.plugin.touches for plugin in find_plugins()] == [[], []]
    with pytest.raises(AssertionError, match="device hook replay"):
        platform.replay(None)
    touches = {plugin.name: plugin.plugin.touches for plugin in find_plugins()}
    assert touches == {"x": ["replay"], "y": []}


# Allow-list and block-list -------------------------------------------------------------------


def test_only_allowed_third_parties_load(site, caplog):
    site.install("graphhal", {"cpu": usable("cpu", reference=True)})
    for name in ("x", "y"):
        site.install(f"vendor-{name}", {name: usable(name)})
    found = lines(Settings(plugins=" x "))
    assert found["x"] == "usable"
    assert found["y"] == "not loaded: not in GRAPHHAL_PLUGINS"
    assert found["cpu"].startswith("usable")  # graphhal's own need no leave
    assert not [m for m in sys.modules if m.startswith(f"fake_{site.path.name}_3")]
    assert "not installed" not in caplog.text
    assert lines(Settings(plugins=""))["x"] == "not loaded: not in GRAPHHAL_PLUGINS"


def test_a_blocked_plugin_is_not_imported(site):
    site.install("graphhal", {"cpu": usable("cpu", reference=True)})
    site.install("vendor", {"x": "raise AssertionError('imported')"})
    found = lines(Settings(block_plugins="x, cpu", plugins="x"))
    assert found == dict.fromkeys(("cpu", "x"), "not loaded: blocked by GRAPHHAL_BLOCK_PLUGINS")


def test_names_that_are_not_installed_are_reported(no_own_platforms, caplog):
    no_own_platforms.install("vendor", {"x": usable("x")})
    no_own_platforms.install("vendor-towers", {"towers": ""}, group="graphhal.adapters")
    find_plugins(Settings(plugins="x,typo,towers", block_plugins="tyop"))
    assert (
        "GRAPHHAL_PLUGINS names typo, which is not installed. Installed: towers, x" in caplog.text
    )
    assert "GRAPHHAL_BLOCK_PLUGINS names tyop, which is not installed" in caplog.text


@pytest.mark.parametrize("doing", ["loading", "probing"])
def test_a_plugin_that_hangs_is_named_while_it_is_waited_for(
    no_own_platforms, caplog, monkeypatch, doing
):
    """It goes on once the log names it: a name that comes later helps nobody."""
    monkeypatch.setattr(discovery, "SLOW_SECONDS", 0.05)
    monkeypatch.setattr(discovery, "log_at_last", lambda: caplog.text, raising=False)
    wait = """
import time
from graphhal import discovery
end = time.monotonic() + 10
while "takes more than" not in discovery.log_at_last() and time.monotonic() < end:
    time.sleep(0.01)
"""
    probe = "\n".join([*(wait.splitlines() if doing == "probing" else ()), "return info('x')"])
    source = platform_source(probe) + (wait if doing == "loading" else "")
    no_own_platforms.install("vendor", {"x": source})
    assert lines() == {"x": "usable"}
    assert f"{doing} plugin x takes more than 0.05 s; GRAPHHAL_BLOCK_PLUGINS=x" in caplog.text


def test_no_plugin_is_named_slow_that_is_not(no_own_platforms, caplog, monkeypatch):
    monkeypatch.setattr(discovery, "SLOW_SECONDS", 0.2)
    no_own_platforms.install("vendor", {"x": usable("x")})
    lines()
    time.sleep(0.4)
    assert "takes more than" not in caplog.text


# Adapters ------------------------------------------------------------------------------------

ADAPTERS = """
from graphhal import hookimpl

class Factory:
    def __init__(self, name):
        self.name = name
        self.modality = "image" if name != "four" else None

    def wrap(self, module): ...
    def build(self, preset, device, dtype, seed=0): ...
    def load(self, adapter, files): ...

class Unable(Factory):
    build = None

class Unmade(Factory):
    name, modality = "seven", "image"

@hookimpl
def graphhal_adapters():
    {body}
"""


def test_adapters_of_broken_plugins_are_left_out(no_own_platforms, caplog):
    sources = {
        "a": ADAPTERS.format(body="return [Factory('one'), Factory('two')]"),
        "b": ADAPTERS.format(body="raise RuntimeError('no weights')"),
        "c": ADAPTERS.format(body="return None"),
        "d": ADAPTERS.format(body="return [object(), Factory('five')]"),
        "e": "import no_such_library_at_all",
        "f": ADAPTERS.format(body="yield from [Factory('two'), Factory('three')]"),
        "g": ADAPTERS.format(body="return 3"),
        "h": ADAPTERS.format(body="return [Factory(None)]"),
        "i": ADAPTERS.format(body="raise SystemExit(3)"),
        "j": ADAPTERS.format(body="return [Factory('four')]"),
        "k": ADAPTERS.format(body="return [Unable('six'), Unmade]"),
    }
    no_own_platforms.install("vendor", sources, group="graphhal.adapters")
    assert [factory.name for factory in find_adapters()] == ["one", "two", "five", "three"]
    for name in ("b", "c", "e", "g", "i"):
        assert f"adapters of plugin {name} are left out" in caplog.text
    assert "of plugin h is left out: a name is a word" in caplog.text
    assert "of plugin d is left out: a name is a word" in caplog.text
    assert "adapter four of plugin j is left out: a modality is a word" in caplog.text
    assert "adapter two of plugin f is left out: the name is taken" in caplog.text
    assert "adapter six of plugin k is left out: it has no method build" in caplog.text
    assert "adapter seven of plugin k is left out: it is a class; return an obj" in caplog.text
    assert "adapters of plugin i are left out: SystemExit: 3" in caplog.text
    assert "plugin e (vendor 1.2.3) is skipped: ModuleNotFoundError: No module" in caplog.text
    assert [f.name for f in find_adapters(Settings(block_plugins="a,d"))] == ["two", "three"]


def test_nobody_takes_the_name_or_the_place_of_an_own_adapter(site):
    own = ADAPTERS.format(body="return [Factory('one'), Factory('two')]")
    site.install("graphhal", {"own": own}, group="graphhal.adapters")
    other = ADAPTERS.format(body="return [Factory('three'), Factory('two')]")
    site.install("vendor", {"a": other}, group="graphhal.adapters")
    found = [(type(each).__module__[-2:], each.name) for each in find_adapters()]
    assert found == [("_1", "one"), ("_1", "two"), ("_2", "three")]


# Binding -------------------------------------------------------------------------------------


def test_hooks_are_bound_once_to_the_implementation_itself():
    plugin = PlainPlugin()
    platform = bind(plugin, PLAIN)
    assert platform.replay == plugin.graphhal_replay
    assert platform.info is PLAIN


class Sparse(PlainPlugin):
    """Takes fewer arguments, in another order, and some of its own."""

    @hookimpl
    def graphhal_replay(self):
        return "no graph"

    @hookimpl
    def graphhal_step(self, boundaries, kind, flavour="sweet"):
        return (boundaries, kind, flavour)

    @hookimpl
    def graphhal_update_boundaries(self, graph, boundaries=None):
        return (graph, boundaries)


def test_an_implementation_may_take_fewer_arguments():
    platform = bind(Sparse(), PLAIN)
    assert platform.replay("graph") == "no graph"
    assert platform.step("replay", "graph", "inputs", "bounds") == ("bounds", "replay", "sweet")
    assert platform.update_boundaries("graph", "update") == ("graph", "update")


def test_arguments_of_its_own_come_after_those_of_the_hook():
    class OwnFirst(PlainPlugin):
        @hookimpl
        def graphhal_replay(self, stream=None, graph=None):
            """Would take the graph for a stream."""

    with pytest.raises(PluginError, match=r"^plugin 'plugin': hook graphhal_replay takes \(stream"):
        bind(OwnFirst(), PLAIN)


# Fresh process -------------------------------------------------------------------------------


def test_a_fresh_process_survives_every_broken_plugin_at_once(tmp_path):
    site = Site(tmp_path)
    site.install("graphhal", {})
    site.install("vendor-broken", {name: source for name, (source, _) in BROKEN.items()})
    site.install("vendor-good", {"good": usable("good")})
    program = """
        import json, sys
        from graphhal.discovery import find_plugins, open_platform
        found = {p.name: [p.describe(), p.distribution, p.version] for p in find_plugins()}
        chosen = open_platform().info.name
        print(json.dumps([found, chosen, "torch" in sys.modules]))
    """
    root = Path(__file__).parents[1]
    environment = {k: v for k, v in os.environ.items() if not k.startswith("GRAPHHAL_")}
    environment["PYTHONPATH"] = os.pathsep.join([str(tmp_path), str(root)])
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(program)],
        env=environment,
        capture_output=True,
        text=True,
        check=True,
        timeout=100,
    )
    found, chosen, torch_loaded = json.loads(done.stdout)
    assert chosen == "good"
    assert not torch_loaded
    assert found.pop("good") == ["usable", "vendor-good", "1.2.3"]
    assert set(found) == set(BROKEN)
    for name, (_, words) in BROKEN.items():
        assert words in found[name][0]
        assert found[name][1:] == ["vendor-broken", "1.2.3"]


def test_pytorch_that_fails_half_way_is_imported_once_and_named(tmp_path):
    """As it does where Ascend's extension lacks CANN: a second import ends the process."""
    (tmp_path / "torch").mkdir()
    (tmp_path / "torch" / "_C.py").touch()
    (tmp_path / "torch" / "__init__.py").write_text(
        "import torch._C; print('imported')\n"
        "raise RuntimeError('no extension xpu') from ImportError('libxpu.so is missing')\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", "from graphhal.cli import main; main()", "platforms", "--json"],
        capture_output=True, text=True, timeout=100, check=True,
        env={**os.environ, "PYTHONPATH": os.pathsep.join([str(tmp_path), *sys.path])},
    )  # fmt: skip
    assert done.stderr.count("imported\n") == 1
    assert "RuntimeError: no extension xpu (libxpu.so is missing)" in done.stdout
