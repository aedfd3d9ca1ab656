"""How long a slot must be put aside depends on the engine that might still write it."""

from __future__ import annotations

import pytest

from diffcluster.config import RoleConfig
from diffcluster.errors import ConfigError
from diffcluster.messages import Session
from diffcluster.roles.rules import check_quarantine

MOONCAKE, SHM = Session("mooncake", "x"), Session("shm", "x")


def test_an_engine_that_cannot_be_fenced_needs_a_quarantine_beyond_the_last_late_push() -> None:
    config = RoleConfig(transfer_timeout_s=4.0, quarantine_s=8.0)
    with pytest.raises(ConfigError, match=r"role\.quarantine_s: .*8\.0 s in all, got 8\.0"):
        check_quarantine(config, [SHM, MOONCAKE], heartbeat_s=1.0)
    check_quarantine(config, [SHM, MOONCAKE], heartbeat_s=0.9)


def test_an_engine_that_knows_who_writes_does_not() -> None:
    check_quarantine(RoleConfig(transfer_timeout_s=4.0, quarantine_s=5.0), [SHM], heartbeat_s=60.0)
