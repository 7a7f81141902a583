"""The default ladder of token budgets: dense, because graphs share their memory."""

from graphhal.settings import Settings

GRANULE = 16
"""Tokens between the budgets below `DENSE_FROM`."""
DENSE_FROM = 64
BUSY_FROM = 512
"""Tokens from which a card is busy with the rows themselves rather than with launches, so that
padding costs its share: 784 tokens in a graph of 832 took 6 % longer on an H200."""
HUGE_FROM = 4096
"""Tokens from which a graph more costs some seconds at start-up, for groups that are seldom."""


def token_budgets(settings: Settings, steps: int = 8, busy_steps: int = 16) -> tuple[int, ...]:
    """Rising budgets up to `settings.max_tokens`, or the ones that the settings name.

    Args:
        settings: `token_budgets` wins over `max_tokens`.
        steps: budgets in each doubling above `DENSE_FROM`; padding is below 1 / steps.
        busy_steps: as `steps`, between `BUSY_FROM` and `HUGE_FROM`.
    """
    if settings.token_budgets is not None:
        return settings.token_budgets
    top = settings.max_tokens
    budgets = list(range(GRANULE, min(DENSE_FROM, top) + 1, GRANULE))
    octave = DENSE_FROM
    while octave < top:
        step = octave // (busy_steps if BUSY_FROM <= octave < HUGE_FROM else steps)
        budgets += range(octave + step, min(2 * octave, top) + 1, step)
        octave *= 2
    if not budgets or budgets[-1] != top:
        budgets.append(top)
    return tuple(budgets)
