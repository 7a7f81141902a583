"""What all tests share."""

from hypothesis import settings

# Two busy cores: a slow example is no failure.
settings.register_profile("graphhal", deadline=None)
settings.load_profile("graphhal")
