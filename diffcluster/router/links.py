"""Who writes to whom: senders meet their receivers before the first push, so that no request waits for a handshake."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise
from typing import Final

from diffcluster.ids import Incarnation, Role
from diffcluster.messages import Meet, Met, Part, Peer, Register
from diffcluster.router.actions import Note
from diffcluster.router.membership import Membership
from diffcluster.router.state import ROUTES, Instance

__all__ = ["Links", "peer"]

_HANDS_TO: Final[dict[Role, Role]] = {sender: receiver for route in ROUTES for sender, receiver in pairwise(route)}


def peer(register: Register) -> Peer:
    """An instance as those that write to it know it."""
    return Peer(register.name, register.incarnation, register.host, register.sessions)


class Links(Membership):
    """Keeps `Instance.links` of senders."""

    def introduce(self, incarnation: Incarnation) -> None:
        """A new instance meets those it writes to, and those that write to it meet it."""
        new = self.cluster.instances[incarnation]
        receiver = _HANDS_TO.get(new.role)
        if receiver is not None:
            for _, known in self.pool(receiver, new.register.model.id):
                self.send(incarnation, Meet(peer=peer(known.register)))
        for sender in self._senders_to(new):
            self.send(sender, Meet(peer=peer(new.register)))

    def parted(self, incarnation: Incarnation, instance: Instance) -> None:
        """Those that wrote to it give up their connections."""
        for sender in self._senders_to(instance):
            links = {
                peer: engine for peer, engine in self.cluster.instances[sender].links.items() if peer != incarnation
            }
            self.change(sender, links=links)
            self.send(sender, Part(receiver=incarnation))

    def met(self, sender: Incarnation, message: Met) -> None:
        """A sender has tried out its link to a receiver."""
        receiver = self.cluster.instances.get(message.receiver)
        if receiver is None:
            return
        instance = self.cluster.instances[sender]
        self.change(sender, links={**instance.links, message.receiver: message.engine})
        if message.engine is None:
            self.do(Note(f"{instance.name} cannot write to {receiver.name}: {message.reason}", warning=True))
        else:
            self.do(Note(f"{instance.name} writes to {receiver.name} by {message.engine}"))

    def can_reach(self, sender: Incarnation | None, receiver: Incarnation) -> bool:
        """Whether nothing speaks against a push from `sender` to `receiver`."""
        instance = self.cluster.instances.get(sender) if sender is not None else None
        return instance is not None and instance.links.get(receiver, "unknown") is not None

    def _senders_to(self, receiver: Instance) -> Iterator[Incarnation]:
        for sender, role in _HANDS_TO.items():
            if role == receiver.role:
                yield from [incarnation for incarnation, _ in self.pool(sender, receiver.register.model.id)]
