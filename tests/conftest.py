"""Settings for all tests."""

from __future__ import annotations

from typing import TYPE_CHECKING

from hypothesis import settings

if TYPE_CHECKING:
    import pytest

# how long an example takes says more about what else the machine does than about the code
settings.register_profile("fxshard", deadline=None)
settings.load_profile("fxshard")


def pytest_addoption(parser: pytest.Parser) -> None:
    """Let the operators of ``tests/ranks/test_operators.py`` be drawn anew, and ranks run on GPUs."""
    parser.addoption("--operator-seed", type=int, default=0, help="of the operators drawn at random")
    parser.addoption("--rank-device", default="cpu", help="'cuda': what tests.ranks.checks judges, by NCCL")


def pytest_report_header(config: pytest.Config) -> str:
    """Say what the operators are drawn from."""
    return f"operators drawn at random: seed {config.getoption('--operator-seed')}"
