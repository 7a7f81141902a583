"""The entry point in processes that vLLM starts: loaded, idempotent, invisible without the flag."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

HERE = Path(__file__).resolve().parent

PRELUDE = """
import os, sys
import torch
if "+cpu" in torch.__version__:
    import torchvision_schemas
"""


def python(code: str, **environment: str) -> str:
    found = subprocess.run(
        [sys.executable, "-c", code],
        env={**os.environ, **environment},
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert found.returncode == 0, found.stderr[-3000:]
    return found.stdout


def fake_vllm(root: Path) -> None:
    folder = root / "vllm" / "v1" / "worker"
    folder.mkdir(parents=True)
    for package in (folder, folder.parent, folder.parent.parent):
        (package / "__init__.py").touch()
    (folder / "encoder_cudagraph.py").write_text("class EncoderCudaGraphManager: pass\n")


def test_registering_imports_neither_torch_nor_vllm() -> None:
    out = python(
        "import sys\n"
        "from graphhal.vllm_worker import plugin\n"
        "plugin.register(); plugin.register()\n"
        "print([n for n in ('torch', 'vllm', 'pydantic') if n in sys.modules],"
        " sum(type(f).__name__ == '_Watch' for f in sys.meta_path))"
    )
    assert out.strip() == "[] 1"


def test_levels_that_were_off_before_vllms_logger_was_joined_are_asked_again() -> None:
    out = python(
        "import logging\n"
        "from graphhal.vllm_worker import vllms_log\n"
        "logging.getLogger('vllm').setLevel(logging.INFO)\n"
        "line = logging.getLogger('graphhal.vllm_worker.executor')\n"
        "before = line.isEnabledFor(logging.INFO)\n"
        "vllms_log.join_vllms_log()\n"
        "print(before, line.isEnabledFor(logging.INFO))"
    )
    assert out.strip() == "False True"


def test_every_module_of_a_model_that_may_opt_in_is_watched() -> None:
    """One that is not would gain nothing where the runner was imported before it."""
    from graphhal.vllm_worker import plugin, towers

    modules = {module for classes in towers.OPT_IN.values() for module, _ in classes}
    assert set(plugin.OPT_IN_MODULES) == modules


def test_a_watched_module_looks_untouched(tmp_path: Path) -> None:
    """Loader and spec are the module's own afterwards, and an import error stays one."""
    fake_vllm(tmp_path)
    code = (
        "import sys\n"
        "from graphhal.vllm_worker import plugin\n"
        "plugin.register()\n"
        "import vllm.v1.worker.encoder_cudagraph as m\n"
        "print(type(m.__loader__).__name__, type(m.__spec__.loader).__name__,"
        " '__new__' in vars(m.EncoderCudaGraphManager))\n"
    )
    assert python(code, PYTHONPATH=f"{tmp_path}:{os.environ.get('PYTHONPATH', '')}").split() == [
        "SourceFileLoader",
        "SourceFileLoader",
        "True",
    ]


def test_modules_that_two_threads_import_at_a_time_are_both_watched() -> None:
    """One that was missed would leave vLLM's own manager in place, in silence."""
    import importlib.machinery
    import threading

    from graphhal.vllm_worker import plugin

    watch = plugin._Watch()
    spec = importlib.machinery.ModuleSpec("m", importlib.machinery.SourceFileLoader("m", "m.py"))
    looking, found = threading.Event(), threading.Event()
    specs = {}

    def slow_find(name: str) -> importlib.machinery.ModuleSpec:
        if name == plugin.WATCHED[0]:
            looking.set()
            found.wait(10)
        return importlib.machinery.ModuleSpec(name, spec.loader)

    def look(name: str) -> None:
        specs[name] = watch.find_spec(name, None)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(plugin, "find_spec", slow_find)
        first = threading.Thread(target=look, args=(plugin.WATCHED[0],))
        first.start()
        looking.wait(10)
        look(plugin.WATCHED[1])
        found.set()
        first.join()
    assert {type(s and s.loader) for s in specs.values()} == {plugin._AfterImport}


@pytest.mark.parametrize(
    ("options", "visible"),
    [
        ("cudagraph_mm_encoder=False", "False"),
        ("", "False"),
        ("cudagraph_mm_encoder=True", "True"),
    ],
)
def test_nothing_is_replaced_where_the_configuration_in_sight_says_off(
    tmp_path: Path, options: str, visible: str
) -> None:
    fake_vllm(tmp_path)
    code = (
        "import types\n"
        "from graphhal.vllm_worker import plugin\n"
        "plugin._admit = lambda config: None\n"
        "plugin.register()\n"
        "def start(vllm_config):\n"
        "    import vllm.v1.worker.encoder_cudagraph as m\n"
        "    return '__new__' in vars(m.EncoderCudaGraphManager)\n"
        "compilation = types.SimpleNamespace(" + options + ")\n"
        "print(start(types.SimpleNamespace(compilation_config=compilation)))\n"
    )
    out = python(code, PYTHONPATH=f"{tmp_path}:{os.environ.get('PYTHONPATH', '')}")
    assert out.strip() == visible


STARTER = """
import multiprocessing, os, sys

def watchers():
    return sum(type(finder).__name__ == "_Watch" for finder in sys.meta_path)

def worker(queue):
    from vllm.plugins import load_general_plugins
    load_general_plugins()
    load_general_plugins()
    queue.put(watchers())

def started(method):
    context = multiprocessing.get_context(method)
    queue = context.Queue()
    process = context.Process(target=worker, args=(queue,))
    process.start()
    count = queue.get(timeout=200)
    process.join()
    return count

if __name__ == "__main__":
    os.environ.pop("VLLM_PLUGINS", None)
    print("RESULT unset", started("spawn"), flush=True)
    import torch
    if "+cpu" in torch.__version__:
        import torchvision_schemas
    from vllm.plugins import load_general_plugins
    os.environ["VLLM_PLUGINS"] = "other"
    print("RESULT other", started("fork"), flush=True)
    os.environ["VLLM_PLUGINS"] = "graphhal"
    load_general_plugins()
    print("RESULT parent", watchers())
    print("RESULT fork", started("fork"))
"""


@pytest.mark.vllm
@pytest.mark.timeout(600)
def test_every_process_that_vllm_starts_loads_the_entry_point_once(tmp_path: Path) -> None:
    """Spawned and forked, through vLLM's own loader, with and without `VLLM_PLUGINS`."""
    script = tmp_path / "starter.py"
    script.write_text(STARTER)
    found = subprocess.run(
        [sys.executable, "-W", "ignore", str(script)],
        capture_output=True,
        text=True,
        timeout=500,
        check=False,
    )
    assert found.returncode == 0, found.stderr[-3000:]
    lines = [line for line in found.stdout.splitlines() if line.startswith("RESULT")]
    assert lines == [
        "RESULT unset 1",
        "RESULT other 0",
        "RESULT parent 1",
        "RESULT fork 1",
    ]


WITHOUT_THE_FLAG = """
import logging
records = []
class Keep(logging.Handler):
    def emit(self, record):
        records.append(record)
logging.getLogger().addHandler(Keep())
logging.getLogger("graphhal").setLevel(logging.DEBUG)
from graphhal.vllm_worker import plugin
plugin.register()
import types
class Worker:
    def __init__(self):
        absent = types.SimpleNamespace()  # no field: unknown means no
        self.vllm_config = types.SimpleNamespace(compilation_config=absent)
    def start(self):
        import vllm.v1.worker.encoder_cudagraph as a
        import vllm.v1.worker.gpu.model_states.interface as b
        import vllm.model_executor.models.interfaces as c
        return a, b, c
a, b, c = Worker().start()
manager = a.EncoderCudaGraphManager
print(b.EncoderCudaGraphManager is manager, "__new__" in vars(manager), manager.__module__)
import abc
registry = abc._get_dump(c.SupportsEncoderCudaGraph)[0]
print(len(registry))
print([n for n in sys.modules if n.startswith("graphhal.") and n not in (
    "graphhal.vllm_worker", "graphhal.vllm_worker.plugin", "graphhal.vllm_worker.switch",
    "graphhal.vllm_worker.touched", "graphhal.vllm_worker.vllms_log")])
levels = [r.levelno for r in records if r.name.startswith("graphhal")]
print(max(levels, default=0) <= logging.DEBUG)
"""

OPTED_IN = """
from graphhal.vllm_worker import plugin
plugin.register()
import types
class Worker:
    def __init__(self):
        on = types.SimpleNamespace(cudagraph_mm_encoder=True)
        self.vllm_config = types.SimpleNamespace(
            compilation_config=on, additional_config={"graphhal": {"vllm_models": "qwen3_omni"}}
        )
    def runner(self):
        import vllm.v1.worker.gpu.model_states.interface
    def model(self):
        import vllm.model_executor.models.qwen3_omni_moe_thinker
worker = Worker()
for step in STEPS:
    getattr(worker, step)()
from vllm.model_executor.models import interfaces, qwen3_omni_moe_thinker as thinker
import vllm.v1.worker.encoder_cudagraph as graphs
model = object.__new__(thinker.Qwen3OmniMoeThinkerForConditionalGeneration)
print(interfaces.supports_encoder_cudagraph(model),
    "__new__" in vars(graphs.EncoderCudaGraphManager))
"""

CASES = {
    "without the flag": WITHOUT_THE_FLAG,
    "runner first": OPTED_IN.replace("STEPS", "('runner', 'model')"),
    "model first": OPTED_IN.replace("STEPS", "('model', 'runner')"),
}

IN_FORKS = (
    PRELUDE
    + """
import vllm.model_executor.models.interfaces  # most of vLLM, once; none of what is watched
from graphhal.vllm_worker import plugin
assert not set(plugin.WATCHED) & set(sys.modules)
for name, code in CASES.items():
    sys.stdout.write(f"CASE {name}\\n")
    sys.stdout.flush()
    child = os.fork()
    if child == 0:
        exec(code, {"sys": sys})
        sys.stdout.flush()
        os._exit(0)
    assert os.waitpid(child, 0)[1] == 0, name
"""
)


@pytest.fixture(scope="module")
def said() -> dict[str, list[str]]:
    """Lines of each of `CASES`, run in a process that has not imported the watched modules."""
    lines: dict[str, list[str]] = {}
    for line in python(IN_FORKS.replace("CASES", repr(CASES))).splitlines():
        if line.startswith("CASE "):
            case = lines.setdefault(line.removeprefix("CASE "), [])
        elif lines:
            case.append(line)
    return lines


@pytest.mark.vllm
def test_without_the_flag_vllm_is_as_it_was(said: dict[str, list[str]]) -> None:
    """Every attribute of the modules that graphhal touches, before and after registering."""
    lines = said["without the flag"]
    assert lines[-4] == "True False vllm.v1.worker.encoder_cudagraph"
    assert lines[-3:] == ["0", "[]", "True"]


@pytest.mark.vllm
@pytest.mark.parametrize("first", ["runner", "model"])
def test_an_opted_in_model_gains_the_protocol_whatever_is_imported_first(
    said: dict[str, list[str]], first: str
) -> None:
    """V2 imports its runner, V1 may import the model first; the entry point finds both."""
    assert said[f"{first} first"][-1] == "True True"
