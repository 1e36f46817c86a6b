"""Settings for all tests."""

from __future__ import annotations

from hypothesis import settings

# how long an example takes says more about what else the machine does than about the code
settings.register_profile("fxshard", deadline=None)
settings.load_profile("fxshard")
