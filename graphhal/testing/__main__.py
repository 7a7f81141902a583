"""`python -m graphhal.testing --platform NAME`: the conformance suite as a table, without pytest.

Exit status: 0 every check passed or has a reason not to run, 1 a check failed, 2 the platform
cannot serve here (its reason is printed).
"""

import argparse
import json
import sys
from collections import Counter
from collections.abc import Iterator, Sequence
from importlib import import_module
from typing import Any

import torch

from graphhal.discovery import find_plugins
from graphhal.errors import GraphhalError, PluginError
from graphhal.testing import CHECKS, Check, Outcome, Result, Subject, checks, open_subject, run
from graphhal.testing.contract import describe

_DTYPES = ("float32", "float16", "bfloat16", "float64")
_MARKS = {
    Outcome.PASSED: "ok",
    Outcome.FAILED: "FAIL",
    Outcome.UNCLAIMED: "unclaimed",
    Outcome.NOT_APPLICABLE: "n/a",
}


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command; returns its exit status."""
    options = _parser().parse_args(arguments)
    if options.list:
        _list(options.json)
        return 0
    try:
        subject = _open(options)
    except GraphhalError as error:
        if options.json:
            print(json.dumps({"platform": options.platform, "unavailable": str(error)}))  # noqa: T201
        else:
            print(f"{options.platform or options.plugin}: {error}")  # noqa: T201
        return 2
    head = describe(subject.info)
    if not options.json:
        print(f"{head}, toy encoder in {str(subject.dtype).removeprefix('torch.')}")  # noqa: T201
    results = list(_shown(run(subject, options.check or None), options.json))
    failed = [result for result in results if result.outcome is Outcome.FAILED]
    counts = Counter(str(result.outcome) for result in results)
    if options.json:
        report = {
            "platform": subject.name,
            "versions": dict(subject.info.versions),
            "dtype": str(subject.dtype).removeprefix("torch."),
            "counts": counts,
            "results": [result.as_dict() for result in results],
        }
        print(json.dumps(report))  # noqa: T201
    else:
        print(", ".join(f"{count} {outcome}" for outcome, count in counts.items()))  # noqa: T201
    return 1 if failed else 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m graphhal.testing", description=__doc__)
    parser.add_argument("--platform", help="name of an installed platform")
    parser.add_argument(
        "--plugin",
        help="import path of a plugin that is not installed: package.module, or "
        "package.module:attribute; an attribute that is a class or function is called",
    )
    parser.add_argument("--check", action="append", choices=sorted(CHECKS), metavar="NAME")
    parser.add_argument("--dtype", choices=_DTYPES, help="of the toy encoder")
    parser.add_argument("--json", action="store_true", help="one JSON object instead of a table")
    parser.add_argument("--list", action="store_true", help="list the checks and leave")
    return parser


def _open(options: argparse.Namespace) -> Subject:
    dtype = getattr(torch, options.dtype) if options.dtype else None
    if options.plugin is None:
        return open_subject(options.platform or _only_platform(), dtype)
    module, _, attribute = options.plugin.partition(":")
    try:
        plugin: Any = import_module(module)
        plugin = getattr(plugin, attribute) if attribute else plugin
    except (ImportError, AttributeError) as error:
        raise PluginError(f"it cannot be loaded: {type(error).__name__}: {error}") from error
    plugin = plugin() if attribute and callable(plugin) else plugin
    if not hasattr(plugin, "graphhal_probe"):
        raise PluginError("it lacks the hook graphhal_probe, which a platform needs")
    info = plugin.graphhal_probe()
    name = options.platform or getattr(info, "name", module)
    return Subject(plugin, name, info, None if attribute else module, dtype)


def _only_platform() -> str:
    usable = [plugin.name for plugin in find_plugins() if plugin.usable]
    if len(usable) == 1:
        return usable[0]
    raise GraphhalError(f"name one with --platform; usable here: {', '.join(usable) or 'none'}")


def _shown(results: Iterator[Result], quiet: bool) -> Iterator[Result]:
    width = max(map(len, CHECKS))
    area = ""
    for result in results:
        if not quiet:
            if CHECKS[result.check].area != area:
                area = CHECKS[result.check].area
                print(f"\n{area}")  # noqa: T201
            mark, milliseconds = _MARKS[result.outcome], result.seconds * 1e3
            print(f"  {result.check:<{width}}  {mark:<9} {milliseconds:8.1f} ms")  # noqa: T201
            if result.detail:
                print(f"      {result.detail}")  # noqa: T201
            sys.stdout.flush()
        yield result


def _list(as_json: bool) -> None:
    if as_json:
        print(json.dumps([_described(check) for check in checks()]))  # noqa: T201
        return
    for check in checks():
        waivable = " (may be waived, with a reason)" if check.waivable else ""
        print(f"{check.area}: {check.name}{waivable}\n    {check.demand}")  # noqa: T201


def _described(check: Check) -> dict[str, Any]:
    return {
        "check": check.name,
        "area": check.area,
        "hook": check.hook,
        "may_be_waived": check.waivable,
        "demand": check.demand,
    }


if __name__ == "__main__":
    sys.exit(main())
