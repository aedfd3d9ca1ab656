"""What all tests share."""

from __future__ import annotations

import pytest
from hypothesis import HealthCheck, settings

# How long an example takes says more about the machine than about us.
settings.register_profile("diffcluster", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("diffcluster")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leave out the `gpu` tests where there is no accelerator; they are counted as deselected, not as passed."""
    if not any(item.get_closest_marker("gpu") for item in items):
        return
    import torch

    if torch.accelerator.is_available():
        return
    config.hook.pytest_deselected(items=[item for item in items if item.get_closest_marker("gpu")])
    items[:] = [item for item in items if not item.get_closest_marker("gpu")]
