"""The receive slots of a role as its engines see them: who may write into which."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

from diffcluster.ids import LeaseId
from diffcluster.roles.jobs import Tick

if TYPE_CHECKING:
    from diffcluster.messages import SlotAddress
    from diffcluster.transport.engines.base import Receiver

__all__ = ["Windows"]


class Windows:
    """All engines that a role receives by, as one."""

    def __init__(self, receivers: list[Receiver]) -> None:
        self._receivers = receivers

    def open(self, slot: SlotAddress) -> None:
        """Let peers write into a slot."""
        for receiver in self._receivers:
            receiver.open(slot)

    def close(self, slot: SlotAddress) -> None:
        """Lock peers out of a slot."""
        for receiver in self._receivers:
            receiver.close(slot)

    def writers(self, lease: LeaseId) -> bool | None:
        """Whether somebody may be writing into a slot whose window is closed; None if an engine cannot know."""
        settled = [receiver.settled(lease) for receiver in self._receivers]
        if False in settled:
            return True
        return None if None in settled else False

    def tick(self, quarantined: Iterable[tuple[str, LeaseId]]) -> Tick:
        """What is known of the quarantined leases: (region, lease)."""
        aside = [lease for region, lease in quarantined if region == "receive"]
        known = {lease: self.writers(lease) for lease in aside}
        return Tick({lease: writers for lease, writers in known.items() if writers is not None})
