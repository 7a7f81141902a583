"""pytest plugin: the conformance suite in three lines of a platform's own tests.

    # tests/test_conformance.py
    def test_conformance(graphhal_check):
        graphhal_check()

`pytest --graphhal-platform=NAME` runs it once per check on the installed platform NAME (an ini
option `graphhal_platform` does the same; without either, on every platform that is installed). A
platform that cannot serve this process is one skipped test with its reason, and a failure under
`--require-platform=NAME`. PyTorch is imported only if a test asks for `graphhal_check`.
"""

from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from graphhal.testing import Check, Subject

_FIXTURE = "graphhal_check"
_OPEN = pytest.StashKey[dict[str, "Subject | str"]]()


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add the two options."""
    group = parser.getgroup("graphhal", "conformance of graphhal platforms")
    group.addoption(
        "--graphhal-platform",
        action="append",
        default=[],
        metavar="NAME",
        help="installed platform to run the conformance suite on; may be repeated",
    )
    group.addoption(
        "--require-platform",
        action="append",
        default=[],
        metavar="NAME",
        help="fail, rather than skip, where this platform cannot serve; may be repeated",
    )
    parser.addini("graphhal_platform", "platforms of the conformance suite", type="args")


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """One test per platform and check."""
    if _FIXTURE not in metafunc.fixturenames:
        return
    from graphhal.testing import checks

    cases = []
    for name in _platforms(metafunc.config):
        subject = _subject(metafunc.config, name)
        names = [None] if isinstance(subject, str) else checks()
        for check in names:
            label = "unavailable" if check is None else check.name
            cases.append(pytest.param((name, check), id=f"{name}-{label}"))
    metafunc.parametrize(_FIXTURE, cases, indirect=True)


@pytest.fixture
def graphhal_check(request: pytest.FixtureRequest) -> Callable[[], None]:
    """One conformance check on one platform; call it.

    It skips with a reason where the platform does not claim the check, and fails with the check,
    what happened, what was expected and the hook to look at.
    """
    name, check = request.param
    subject = _subject(request.config, name)
    if isinstance(subject, str):
        if name in request.config.getoption("--require-platform"):
            pytest.fail(f"platform {name} is required here: {subject}", pytrace=False)
        pytest.skip(subject)
    return partial(_run, check, subject)


def _run(check: "Check", subject: "Subject") -> None:
    from graphhal.testing import Outcome

    result = check.run(subject)
    if result.outcome is Outcome.FAILED:
        pytest.fail(result.detail, pytrace=False)
    if result.outcome is not Outcome.PASSED:
        pytest.skip(f"{result.outcome}: {result.detail}")


def _platforms(config: pytest.Config) -> list[str]:
    """Asked for, required, set in the ini file, or all that are installed."""
    chosen: list[str] = [
        *config.getoption("--graphhal-platform"),
        *config.getoption("--require-platform"),
    ]
    chosen = chosen or list(config.getini("graphhal_platform"))
    if not chosen:
        from graphhal.discovery import find_plugins

        chosen = [plugin.name for plugin in find_plugins()]
    return list(dict.fromkeys(chosen))


def _subject(config: pytest.Config, name: str) -> Any:
    """The platform, opened once a session; why it cannot serve, where it cannot."""
    opened = config.stash.setdefault(_OPEN, {})
    if name not in opened:
        from graphhal.errors import GraphhalError
        from graphhal.testing import open_subject

        try:
            opened[name] = open_subject(name)
        except GraphhalError as error:
            opened[name] = str(error)
    return opened[name]
