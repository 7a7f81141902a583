"""What all tests share."""

import pytest
from hypothesis import settings

# Two busy cores: a slow example is no failure.
settings.register_profile("graphhal", deadline=None, max_examples=50)
settings.load_profile("graphhal")


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", "soak: minutes long; runs only where -m names it")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if "soak" in config.option.markexpr:
        return
    soaks = [item for item in items if "soak" in item.keywords]
    config.hook.pytest_deselected(items=soaks)
    items[:] = [item for item in items if "soak" not in item.keywords]
