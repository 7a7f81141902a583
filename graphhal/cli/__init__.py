"""The `graphhal` command: platforms, bench, check, plan."""

from graphhal.cli.app import main

__all__ = ["main"]
