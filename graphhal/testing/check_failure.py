"""How a check ends that does not pass."""


class CheckFailure(AssertionError):  # noqa: N818  (pytest shows an AssertionError as a failure)
    """A platform did not do what the contract asks.

    Args:
        did: what the platform did, as a clause (`"replay 2 returned the output of replay 1"`).
        expected: what it should have done.
        hook: the hook, or the part of `PlatformInfo`, to look at; by default the check's own.
    """

    def __init__(self, did: str, expected: str, hook: str | None = None) -> None:
        super().__init__(did, expected, hook)
        self.did = did
        self.expected = expected
        self.hook = hook


class NotApplicable(Exception):  # noqa: N818  (an outcome, not an error)
    """The platform's own description says that the question does not arise; says why."""
