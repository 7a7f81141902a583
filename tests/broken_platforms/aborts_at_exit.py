"""A plugin module whose device runtime aborts at interpreter shutdown."""

import atexit
import os

from tests.broken_platforms.lazy_module import *  # noqa: F403
from tests.broken_platforms.lazy_module import _platform, hookimpl


@hookimpl
def graphhal_capture(request):
    atexit.register(os._exit, 134)
    return _platform().graphhal_capture(request)
