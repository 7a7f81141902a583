"""The matrix is declarative and checked; the runner neither hides a failure nor invents one."""

import sys
from pathlib import Path

import pytest

from ci import matrix, news, reference, run, workflow
from ci.matrix import Cell, MatrixError
from graphhal.plan import MissReason

THIS_PYTHON = f"{sys.version_info.major}.{sys.version_info.minor}"
CELL = """
[[cell]]
name = "one"
title = "a cell"
kind = "pure"
platform = "-"
python = "3.11"
pytorch = "-"
vllm = "-"
command = "true"
"""


def cell(**changes: object) -> Cell:
    fields = {
        "name": "one", "title": "", "kind": "pure", "platform": "-", "python": THIS_PYTHON,
        "pytorch": "-", "vllm": "-", "command": "true",
    }  # fmt: skip
    return Cell(**(fields | changes))


@pytest.fixture(autouse=True)
def scratch(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(run, "WORK", tmp_path / "work")


def test_the_matrix_is_well_formed() -> None:
    cells = matrix.load()
    assert {"tests", "main-job", "checks", "packaging"} <= {cell.name for cell in cells}
    assert {cell.kind for cell in cells} == set(matrix.KINDS)
    assert {"cpu", "cuda", "rocm", "npu"} <= {cell.platform for cell in cells}


def test_the_hosted_workflow_is_what_the_matrix_says() -> None:
    assert workflow.WORKFLOW.read_text() == workflow.workflow(matrix.load())


def test_a_workflow_out_of_step_is_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(workflow, "ROOT", tmp_path)
    monkeypatch.setattr(workflow, "WORKFLOW", tmp_path / "ci.yml")
    assert workflow.main(["--check"]) == 1
    assert workflow.main(["--write"]) == 0
    assert workflow.main(["--check"]) == 0
    workflow.WORKFLOW.write_text("jobs: {}\n")
    assert workflow.main(["--check"]) == 1


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (CELL + CELL, "two cells are called 'one'"),
        (CELL + "colour = 'red'\n", "unknown field 'colour'"),
        (CELL.replace('"pure"', '"fast"'), "kind 'fast' is not one of"),
        (CELL.replace('command = "true"', ""), "command"),
        (CELL + "needs = ['luck']\n", "need 'luck' is not one of"),
        (CELL.replace('"pure"', '"device"'), "a device cell needs 'device:-'"),
        ("", "has no"),
    ],
)
def test_a_malformed_matrix_is_told(tmp_path: Path, text: str, message: str) -> None:
    path = tmp_path / "matrix.toml"
    path.write_text(text)
    with pytest.raises(MatrixError, match=message):
        matrix.load(path)


def test_a_passing_cell_counts_its_tests() -> None:
    lines: list[str] = []
    closing = "echo '=== 12 passed, 3 skipped in 4.56s (0:00:04) ==='"
    result = run.run_cell(cell(command=closing), lines.append)
    assert (result.status, result.tests, result.skipped) == ("passed", 12, 3)
    assert "=== 12 passed, 3 skipped in 4.56s (0:00:04) ===" in lines


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"command": "exit 3"}, "exit 3"),
        ({"command": "false | cat"}, "exit 1"),
        ({"command": "echo $unset_variable"}, "exit 1"),
        ({"setup": ("exit 7",), "command": "true"}, "exit 7"),
        ({"command": "sleep 60", "minutes": 0}, "over its 0 minutes"),
    ],
)
def test_a_cell_that_cannot_fails(changes: dict[str, object], reason: str) -> None:
    result = run.run_cell(cell(**changes), lambda _: None)
    assert result.status == "failed"
    assert result.reason.startswith(reason)


def test_a_cell_sees_its_scratch_folder_and_interpreter() -> None:
    command = 'test -d "$CELL_WORK" && "$CELL_PYTHON" -c "" && test ! -e "$CELL_VENV"'
    assert run.run_cell(cell(command=command), lambda _: None).status == "passed"


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"needs": ("device:abacus",)}, "no abacus device here"),
        ({"needs": ("tool:no-such-tool",)}, "no no-such-tool here"),
        ({"needs": ("file:no/such/file",)}, "no/such/file is not in this checkout"),
        ({"python": "2.6"}, "no Python 2.6 here"),
        ({"needs": ("tool:sh", "file:pyproject.toml")}, None),
    ],
)
def test_what_a_machine_lacks_is_the_reason(changes: dict[str, object], reason: str | None) -> None:
    assert run.missing_need(cell(**changes)) == reason


def test_a_skip_of_a_required_platform_is_a_failure() -> None:
    absent = cell(platform="npu", needs=("device:abacus",))
    assert [result.status for result in run.run([absent], required=[])] == ["skipped"]
    assert [result.status for result in run.run([absent], required=["npu"])] == ["failed"]


@pytest.mark.parametrize("jobs", [1, 2])
@pytest.mark.parametrize(("minutes", "said"), [(-1.0, "no time: -1 minutes are over"), (60.0, "")])
def test_what_is_for_when_there_is_time_comes_last_or_not_at_all(
    jobs: int, minutes: float, said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    cells = [cell(name="two", if_time=True, minutes=30), cell(name="one", minutes=1)]
    two, one = run.run(cells, required=[], jobs=jobs, time_minutes=minutes)
    assert (one.status, two.status, two.reason) == ("passed", "skipped" if said else "passed", said)
    shown = capsys.readouterr().out
    assert shown.index("one") < (len(shown) if said else shown.index("two"))


def test_cells_side_by_side_keep_their_output_together(
    capsys: pytest.CaptureFixture[str],
) -> None:
    talk = "for n in 1 2 3; do echo $CELL_WORK says $n; sleep 0.1; done"
    cells = [cell(name=name, command=talk) for name in ("one", "two")]
    results = run.run(cells, required=[], jobs=2)
    assert [(result.cell, result.status) for result in results] == [
        ("one", "passed"),
        ("two", "passed"),
    ]
    lines = [line for line in capsys.readouterr().out.splitlines() if line.startswith("/")]
    speakers = [line.partition(" says ")[0] for line in lines]
    assert len(lines) == 6
    assert speakers[0] == speakers[1] == speakers[2] != speakers[3]


def test_the_exit_status_and_the_table_tell_of_a_failure(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    cells = (cell(), cell(name="two", command="exit 1"), cell(name="three", needs=("tool:zzz",)))
    monkeypatch.setattr(run, "load", lambda: cells)
    assert run.main([]) == 1
    shown = capsys.readouterr().out
    assert [line.split()[:2] for line in shown.splitlines()[-3:]] == [
        ["one", "passed"],
        ["two", "failed"],
        ["three", "skipped"],
    ]
    assert run.main(["--cell", "one"]) == 0


@pytest.mark.parametrize("arguments", [["--cell", "none"], ["--require-platform", "none"]])
def test_an_unknown_name_is_a_usage_error(
    arguments: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert run.main(arguments) == 2
    assert "none" in capsys.readouterr().err


def test_news_fragments_move_into_the_changelog(tmp_path: Path) -> None:
    (tmp_path / "newsfragments").mkdir()
    (tmp_path / "CHANGELOG.md").write_text(f"# Changelog\n\n{news.MARK}\n\n## 0.1.0\n")
    for name, text in (
        ("b.fixed.md", "A crash.\n"),
        ("a.added.md", "A flag\nof use."),
        ("README.md", ""),
    ):
        (tmp_path / "newsfragments" / name).write_text(text)
    news.release(tmp_path, "0.2.0", "2030-01-02")
    assert (tmp_path / "CHANGELOG.md").read_text() == (
        f"# Changelog\n\n{news.MARK}\n\n## 0.2.0 (2030-01-02)\n\n### Added\n\n- A flag of use.\n\n"
        "### Fixed\n\n- A crash.\n\n\n## 0.1.0\n"
    )
    assert [path.name for path in (tmp_path / "newsfragments").iterdir()] == ["README.md"]


def test_a_fragment_without_a_kind_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "thing.md"
    path.write_text("text")
    with pytest.raises(ValueError, match=r"thing\.md must be named TOPIC\.KIND\.md"):
        news.section([path], "1", "2030-01-02")


def test_the_fragments_of_this_checkout_have_kinds() -> None:
    paths = [p for p in (run.ROOT / "newsfragments").glob("*.md") if p.name != "README.md"]
    assert news.section(paths, "1", "2030-01-02")


@pytest.mark.parametrize("name", sorted(reference.PAGES))
def test_the_references_in_the_docs_are_what_the_code_says(name: str) -> None:
    path, text = reference.page(name)
    assert path.read_text() == text


@pytest.mark.parametrize("reason", MissReason)
def test_operators_are_told_what_to_do_about_each_miss(reason: MissReason) -> None:
    told = (run.ROOT / "docs" / "operators.md").read_text()
    rows = [line.split("|")[1] for line in told.splitlines() if line.startswith("|")]
    assert any(reason in row for row in rows)


def test_a_stale_reference_is_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "docs").mkdir()
    for file, name in (("vendors.md", "hooks"), ("operators.md", "options")):
        (tmp_path / "docs" / file).write_text(f"<!-- {name}: old -->\n<!-- end of {name} -->\n")
    monkeypatch.setattr(reference, "ROOT", tmp_path)
    assert reference.main(["--check"]) == 1
    assert reference.main(["--write"]) == 0
    assert reference.main(["--check"]) == 0
    assert "### `graphhal_capture`" in (tmp_path / "docs" / "vendors.md").read_text()
    assert "`GRAPHHAL_MEMORY_LIMIT`" in (tmp_path / "docs" / "operators.md").read_text()


def test_a_cell_that_asks_for_a_variable_is_skipped_without_it(monkeypatch):
    heavy = cell(needs=("env:CI_EXTENDED",))
    monkeypatch.delenv("CI_EXTENDED", raising=False)
    assert run.missing_need(heavy) == "set CI_EXTENDED=1 to run it"
    monkeypatch.setenv("CI_EXTENDED", "1")
    assert run.missing_need(heavy) is None
