"""Lines that an operator sees once in a process, however often there is reason for them."""

import logging

_said: set[str] = set()


def warn_once(log: logging.Logger, what: str, reason: str) -> None:
    """A WARNING of what happened and why, unless that reason was given before."""
    if reason not in _said:
        _said.add(reason)
        log.warning("%s: %s", what, reason)
