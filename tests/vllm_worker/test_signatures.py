"""The installed vLLM is compared with the releases that were read."""

import importlib
import types
import zipfile
from pathlib import Path
from typing import Any

import pytest

from ci import vllm_signatures
from graphhal.vllm_worker import compatibility, touched

MANAGER_METHODS = [name.rpartition(".")[2] for name in touched.MANAGER[1:]]


def arguments(spelled: str) -> list[str]:
    return [each.rstrip("=") for each in spelled.strip("()").split(", ")]


@pytest.mark.parametrize("release", ["0.26.0", "0.31.0", "0.32.0", "0.33.0"])
def test_what_runners_of_a_release_call_takes_their_arguments(release: str) -> None:
    pytest.importorskip("torch")
    from graphhal.vllm_worker import executor

    names = compatibility.known_signatures()[release]
    for name, method in zip(touched.MANAGER[1:], MANAGER_METHODS, strict=True):
        own = touched.spelled(getattr(executor.EncoderGraphExecutor, method))
        assert arguments(own) == arguments(names[name]), name
    own = touched.spelled(executor.build)
    assert ["self", *arguments(own)] == arguments(names[touched.MANAGER[0]])


def wheel(folder: Path, manager: str) -> Path:
    """A wheel of vLLM's that has nothing but a manager."""
    file = folder / "vllm-0.34.0-cp38-abi3-manylinux_2_28_x86_64.whl"
    with zipfile.ZipFile(file, "w") as made:
        made.writestr(touched.ENCODER_CUDAGRAPH.replace(".", "/") + ".py", manager)
    return file


@pytest.mark.parametrize(
    ("signature", "spelled"),
    [
        ("self, graph_pool", "(self, graph_pool)"),
        (
            "self, graph_pool: int = 0, *, stream, wait=False",
            "(self, graph_pool=, *, stream, wait=)",
        ),
        ("self, *pools, **rest", "(self, *pools, **rest)"),
    ],
)
def test_a_wheel_is_read_as_the_installed_package_is(
    tmp_path: Path, signature: str, spelled: str
) -> None:
    source = f"class EncoderCudaGraphManager:\n    def capture({signature}): ...\n"
    assert vllm_signatures.read(wheel(tmp_path, source)) == {touched.MANAGER[2]: spelled}
    scope: dict[str, Any] = {}
    exec(source, scope)
    assert touched.spelled(scope["EncoderCudaGraphManager"].capture) == spelled


@pytest.mark.vllm
def test_the_table_of_the_installed_release_is_its_own() -> None:
    """A spelling that only another release had must not pass for this one's."""
    release = compatibility.installed_version().partition("+")[0]
    (folder,) = importlib.import_module("vllm").__path__
    assert vllm_signatures.read(Path(folder).parent) == compatibility.known_signatures()[release]


def test_every_touched_name_is_known_in_every_release() -> None:
    table = compatibility.known_signatures()
    assert {"0.26.0", "0.31.0", "0.32.0", "0.33.0"} <= set(table)
    for version, names in table.items():
        assert set(names) == set(touched.ALL), version


def test_the_guides_table_has_every_name_whose_signature_is_compared() -> None:
    guide = Path(__file__).parents[2].joinpath("docs", "vllm.md").read_text()
    for name in touched.ALL:
        _, _, qualname = name.partition(":")
        owner = qualname.split(".")[0]
        assert f"{owner}`" in guide or f"{owner}." in guide, f"{owner} stands in no table"


def test_the_manager_is_constructed_alike_in_every_release() -> None:
    constructor = touched.MANAGER[0]
    spellings = {names[constructor] for names in compatibility.known_signatures().values()}
    assert spellings == {"(self, vllm_config, device, dtype, model)"}


@pytest.mark.parametrize(
    ("version", "served"),
    [
        ("0.26.0", True),
        ("0.31.0+cu130", True),
        ("0.33.9", True),
        ("0.25.1", False),
        ("0.34.0", False),
        ("1.0.0", False),
        ("unknown", False),
        ("dev", False),
    ],
)
def test_versions(version: str, served: bool) -> None:
    problem = compatibility.version_problem(version)
    assert (problem is None) is served
    if problem is not None:
        assert problem == f"vLLM 0.26 to 0.33 was expected, found {version}"


def stand_in(monkeypatch: pytest.MonkeyPatch, capture: Any) -> None:
    manager = type("EncoderCudaGraphManager", (), {"capture": capture})
    module = types.ModuleType(touched.ENCODER_CUDAGRAPH)
    module.EncoderCudaGraphManager = manager  # type: ignore[attr-defined]
    monkeypatch.setattr(compatibility, "import_module", lambda name: module)


def test_a_drifted_signature_is_named_with_both_spellings(monkeypatch: pytest.MonkeyPatch) -> None:
    name = f"{touched.ENCODER_CUDAGRAPH}:EncoderCudaGraphManager.capture"
    stand_in(monkeypatch, lambda self, graph_pool: None)
    assert compatibility.drifts([name]) == []
    stand_in(monkeypatch, lambda self, graph_pool, stream: None)
    (drift,) = compatibility.drifts([name])
    assert (
        str(drift) == f"{name} was expected as (self, graph_pool), found (self, graph_pool, stream)"
    )


def test_a_vanished_name_is_drift(monkeypatch: pytest.MonkeyPatch) -> None:
    stand_in(monkeypatch, lambda self, graph_pool: None)
    (drift,) = compatibility.drifts([touched.MANAGER[1]])
    assert "found nothing (AttributeError" in str(drift)


def test_spelling_marks_defaults_and_keywords() -> None:
    def function(self: Any, a: int, b: int = 1, *, c: int, d: int = 2, **rest: Any) -> None: ...

    assert touched.spelled(function) == "(self, a, b=, *, c, d=, **rest)"


@pytest.mark.vllm
def test_the_installed_vllm_is_one_that_was_read() -> None:
    assert compatibility.drifts(touched.ALL) == []
    assert compatibility.problem((*touched.MANAGER, *touched.PROTOCOL)) is None


@pytest.mark.vllm
@pytest.mark.parametrize("kind", ["version", "signature"])
def test_an_unknown_vllm_keeps_its_own_manager_and_says_so_once(
    engine: Any, kind: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    import vllm_on_cpu as on_cpu
    from vllm.v1.worker.encoder_cudagraph import EncoderCudaGraphManager

    from graphhal.vllm_worker import vllms_log

    monkeypatch.setattr(vllms_log, "_said", set())
    if kind == "version":
        monkeypatch.setattr(compatibility, "installed_version", lambda: "0.34.0")
    else:
        table = {"0.31.0": dict.fromkeys(touched.ALL, "(self, something_else)")}
        monkeypatch.setattr(compatibility, "known_signatures", lambda: table)
    model = on_cpu.qwen3_vl(engine)
    with on_cpu.log_of("graphhal.vllm_worker.executor", caplog):
        for _ in range(2):
            manager = on_cpu.make_manager(engine, model)
            assert type(manager) is EncoderCudaGraphManager
            assert manager.token_budgets == [16, 32, 64]
    lines = [r for r in caplog.records if "is not served" in r.getMessage()]
    assert len(lines) == 1
    assert "vLLM's own encoder graphs serve it" in lines[0].getMessage()
    assert "was expected" in lines[0].getMessage()
    assert "found" in lines[0].getMessage()
