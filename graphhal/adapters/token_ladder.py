"""The default ladder of token budgets: dense, because graphs share their memory."""

from graphhal.settings import Settings

GRANULE = 16
"""Tokens between the budgets below `DENSE_FROM`."""
DENSE_FROM = 64


def token_budgets(settings: Settings, steps: int = 8) -> tuple[int, ...]:
    """Rising budgets up to `settings.max_tokens`, or the ones that the settings name.

    Args:
        settings: `token_budgets` wins over `max_tokens`.
        steps: budgets in each doubling above `DENSE_FROM`; padding is below 1 / steps.
    """
    if settings.token_budgets is not None:
        return settings.token_budgets
    top = settings.max_tokens
    budgets = list(range(GRANULE, min(DENSE_FROM, top) + 1, GRANULE))
    octave = DENSE_FROM
    while octave < top:
        step = octave // steps
        budgets += range(octave + step, min(2 * octave, top) + 1, step)
        octave *= 2
    if not budgets or budgets[-1] != top:
        budgets.append(top)
    return tuple(budgets)
