"""The command tree; errors become one message and an exit status, never a traceback.

Exit status: 0 where all is well; 1 where a result disagrees, a graph fails its check, or an error
stopped the work, a file that cannot be read among them; 2 where options, on the command line or in
the environment, ask for what is not there or cannot serve, so that no work was begun.
"""

from __future__ import annotations

import errno
import logging
import sys
from io import TextIOWrapper
from typing import Annotated, Any

import typer
from typer.core import TyperCommand, TyperGroup

import graphhal
from graphhal.cli import screen
from graphhal.cli.bench import bench
from graphhal.cli.check import check
from graphhal.cli.plan import plan
from graphhal.cli.platforms import platforms
from graphhal.errors import GraphhalError, NoPlatformError, SettingsError

OPTIONAL = ("torch", "transformers", "matplotlib", "PIL", "soundfile", "scipy", "skimage")
"""Packages that a bare installation lacks: what the extra `bench` brings."""


class _Group(TyperGroup):
    def invoke(self, ctx: Any) -> Any:
        try:
            return super().invoke(ctx)
        except (SettingsError, NoPlatformError) as error:
            raise screen.fail(str(error), status=2) from error
        except typer.BadParameter as error:  # words of the library that Typer checks with
            error.message = error.message.removeprefix("Value error, ")
            raise
        except GraphhalError as error:
            raise screen.fail(str(error)) from error
        except OSError as error:
            if error.errno == errno.EPIPE:  # who reads has seen enough; Typer knows what to do
                raise
            raise screen.fail(str(error)) from error
        except ModuleNotFoundError as error:
            package = (error.name or "").partition(".")[0]
            if package not in OPTIONAL:
                raise
            raise screen.fail(
                f"the package {package} is not installed; this command needs graphhal[bench]"
            ) from error


class _Command(TyperCommand):
    def invoke(self, ctx: Any) -> Any:
        with screen.only_ours_on_standard_output():
            return super().invoke(ctx)


app = typer.Typer(
    cls=_Group,
    help="Device graphs for multimodal encoders.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
)
for command in (platforms, bench, check, plan):
    app.command(cls=_Command)(command)


def _print_version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"graphhal {graphhal.__version__}")
        raise typer.Exit


@app.callback()
def options(
    verbose: Annotated[bool, typer.Option("--verbose", "-v", help="Show the log.")] = False,
    version: Annotated[
        bool,
        typer.Option(
            "--version", help="Print the version.", callback=_print_version, is_eager=True
        ),
    ] = False,
) -> None:
    """Device graphs for multimodal encoders."""
    # Tables say what the log says; without --verbose it would be said twice.
    logging.basicConfig(level=logging.DEBUG if verbose else logging.CRITICAL)
    logging.getLogger("matplotlib").setLevel(logging.WARNING)


def main() -> None:
    """Entry point of the console script."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, TextIOWrapper):  # of few characters, or closed and None
            stream.reconfigure(errors="replace")
    app()
