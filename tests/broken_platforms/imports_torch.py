"""A plugin module that loads its device library when it is imported."""

import torch  # noqa: F401

from tests.broken_platforms.lazy_module import *  # noqa: F403
