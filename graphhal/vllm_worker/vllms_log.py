"""What an operator sees of graphhal in vLLM's log."""

import logging

_said: set[str] = set()


def warn_once(log: logging.Logger, what: str, reason: str) -> None:
    """A WARNING of what happened and why, unless that reason was given before."""
    if reason not in _said:
        _said.add(reason)
        log.warning("%s: %s", what, reason)


def join_vllms_log() -> None:
    """Let graphhal's lines go where vLLM's go: it configures its own logger alone."""
    ours = logging.getLogger("graphhal")
    ours.parent = logging.getLogger("vllm")
    ours.setLevel(ours.level)  # loggers below remember which levels were off before
