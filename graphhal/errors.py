"""Every exception that graphhal raises.

GraphhalError
├── InputError (ValueError)         an item of a request is wrong; names the item and the fix
├── BoundariesError (ValueError)    sequence ends that cannot describe rows
├── SettingsError (ValueError)      an option is unknown or invalid; names it and what is allowed
├── PluginError                     a plugin breaks the contract; names plugin, hook and argument
│   └── NoPlatformError             not exactly one platform can serve; lists all that were tried
├── AdapterError                    an adapter breaks the contract, or cannot serve this host
├── RefusedError                    an adapter cannot stage a group in its graph; it runs eagerly
├── PeersError                      ranks disagree, or one did not answer in time
├── CaptureError                    one graph could not be captured; its inputs run eagerly
│   ├── HostReadError               captured code read a value that the device had not computed yet
│   ├── UnsupportedOperationError   captured code did what a graph cannot hold
│   └── ResourceExhaustedError      out of memory, streams or events: capture stops growing
└── ReplayError                     a captured graph could not be launched; its inputs run eagerly
"""


class GraphhalError(Exception):
    """Base of all errors that graphhal raises on purpose."""


class InputError(GraphhalError, ValueError):
    """An item of a request cannot be encoded as it is.

    Args:
        problem: what is wrong and how to fix it, one sentence each.
        item: index of the item in its request, where one item is to blame.
    """

    def __init__(self, problem: str, item: int | None = None) -> None:
        super().__init__(problem if item is None else f"item {item}: {problem}")
        self.item = item


class BoundariesError(GraphhalError, ValueError):
    """Sequence ends that are not strictly increasing, not positive, or past the rows."""


class SettingsError(GraphhalError, ValueError):
    """An option is unknown or its value is not allowed."""


class PluginError(GraphhalError):
    """A plugin does not follow `graphhal.hookspecs`."""


class NoPlatformError(PluginError):
    """Not exactly one platform can serve this process."""


class AdapterError(GraphhalError):
    """An adapter does not follow `graphhal.adapter`, or its host cannot be served."""


class RefusedError(GraphhalError):
    """An adapter found, while staging, that a group must not be replayed; it runs eagerly."""


class CaptureError(GraphhalError):
    """One graph could not be captured."""


class HostReadError(CaptureError):
    """Captured code read device data on the host (`.item()`, `.tolist()`, `bool()`, …)."""


class UnsupportedOperationError(CaptureError):
    """Captured code used an operation that a device graph cannot hold."""


class ResourceExhaustedError(CaptureError):
    """Memory, streams or events ran out during capture."""


class PeersError(GraphhalError):
    """Ranks disagree about what they serve, or a rank did not answer in time."""


class ReplayError(GraphhalError):
    """A captured graph could not be launched."""
