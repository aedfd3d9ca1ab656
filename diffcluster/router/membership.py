"""Who belongs to the cluster: registration, heartbeats, loss, draining. The other half of the router's pure machine."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Any, Final

from msgspec.structs import replace

from diffcluster.ids import Incarnation, Role
from diffcluster.messages import (
    MISSED_HEARTBEATS,
    PROTOCOL_VERSION,
    Drained,
    Refused,
    Register,
    Registered,
    RoleHeartbeat,
    RouterHeartbeat,
    RouterToRole,
)
from diffcluster.router.actions import Action, Count, Note, Send
from diffcluster.router.state import Cluster, Instance, Limits

__all__ = ["Membership"]

_REMEMBERED: Final = 1000


class Membership(ABC):
    """Keeps `cluster.instances`. `now` is the time of the event being handled, `actions` what it has led to so far."""

    def __init__(self, limits: Limits, cluster: Cluster) -> None:
        self.limits, self.cluster = limits, cluster
        self.now = 0.0
        self.actions: list[Action] = []
        self._ticked = 0.0

    def register(self, sender: Incarnation, register: Register) -> bool:
        """Take an instance in, or say why not; True if it is new. If not, its answer was lost, so answer again."""
        problem = self._problem(sender, register)
        if problem:
            self._refuse(sender, problem, again=False)
            return False
        fresh = sender not in self.cluster.instances
        if fresh:
            self._replace(register)
            self.cluster.instances[sender] = Instance(register, self.now, self.now)
            self.cluster.names[register.name] = sender
            self.cluster.models[register.model.id] = register.model
            self.do(Count("registered", register.role))
            self.do(Note(f"{register.name} registered as {register.role} of {register.model.id} on {register.device}"))
        self.seen(sender)
        answer = Registered(fresh=fresh, heartbeat_s=self.limits.heartbeat_s, bulk_port=self.limits.bulk_port)
        self.do(Send(sender, answer))
        return fresh

    def _problem(self, sender: Incarnation, register: Register) -> str:
        if register.version != PROTOCOL_VERSION:
            return f"it speaks protocol version {register.version}, the router {PROTOCOL_VERSION}"
        if register.incarnation != sender:
            return "its incarnation is not its address"
        if sender in self.cluster.retired:
            return self.cluster.retired[sender]
        known = self.cluster.models.get(register.model.id)
        served = any(
            instance.register.model.id == register.model.id and instance.name != register.name
            for instance in self.cluster.instances.values()
        )
        if known is not None and known != register.model and served:
            return (
                f"its model {register.model.id} is revision {register.model.revision}, "
                f"while the cluster serves {known.revision}"
            )
        return ""

    def _replace(self, register: Register) -> None:
        """An instance of the same name is the same one, started again; the old one must not come back."""
        old = self.cluster.names.get(register.name)
        if old is None:
            return
        reason = f"a newer process is called {register.name}"
        self.lose(old, reason)
        self.cluster.retired[old] = reason
        if len(self.cluster.retired) > _REMEMBERED:
            del self.cluster.retired[next(iter(self.cluster.retired))]

    def refuse_stranger(self, sender: Incarnation) -> None:
        """Something was said by an instance that is not registered: by now it should know."""
        reason = self.cluster.retired.get(sender)
        self._refuse(sender, reason or "not registered", again=reason is None)

    def seen(self, sender: Incarnation) -> None:
        """The instance lives."""
        self.change(sender, last_seen=self.now)

    def lose_silent(self) -> None:
        """Take instances for lost that have missed their heartbeats.

        Not after a pause of the router's own: then it is we who could not hear, and all get another chance.
        """
        paused = self.now - self._ticked > self.limits.heartbeat_s
        self._ticked = self.now
        if paused:
            for incarnation in list(self.cluster.instances):
                self.seen(incarnation)
        horizon = self.now - MISSED_HEARTBEATS * self.limits.heartbeat_s
        for incarnation in [i for i, instance in self.cluster.instances.items() if instance.last_seen < horizon]:
            self.lose(incarnation, f"is silent for {MISSED_HEARTBEATS} heartbeats")

    def count_heard(self, sender: Incarnation) -> None:
        """One more message of `sender` has arrived."""
        instance = self.cluster.instances.get(sender)
        if instance is not None:
            self.change(sender, heard=instance.heard + 1)

    def beat(self, sender: Incarnation, beat: RoleHeartbeat) -> None:
        """An instance lives. If something between it and us was lost, it has to begin anew: nobody knows what."""
        instance = self.cluster.instances[sender]
        if beat.cut or beat.said != instance.heard:
            self.lose(sender, "was cut off for a moment: messages are missing", blame=False)
            self.refuse_stranger(sender)
        else:
            self.change(sender, heartbeat=beat, full=False)
            self.do(Send(sender, RouterHeartbeat(said=instance.said)))

    def lose(self, incarnation: Incarnation, why: str, *, blame: bool = True) -> None:
        """Strike an instance off; what it worked on is taken up elsewhere. `blame`: it may have died of that work."""
        instance = self._remove(incarnation)
        if instance is not None:
            self.do(Count("lost", instance.role))
            self.do(Note(f"{instance.name} is lost: it {why}", warning=True))
            self.instance_lost(incarnation, blame=blame)

    @abstractmethod
    def instance_lost(self, lost: Incarnation, *, blame: bool) -> None:
        """What follows for requests; the machine's part."""

    def release_drained(self) -> None:
        """Let instances go that asked to leave, and of which nothing is needed any more."""
        for incarnation, instance in list(self.cluster.instances.items()):
            writes = incarnation in self.cluster.closing.values()  # for a request that has ended meanwhile
            if instance.draining and not instance.busy and not instance.retained and not writes:
                self.do(Send(incarnation, Drained()))
                self.do(Note(f"{instance.name} has left"))
                self._remove(incarnation)

    @abstractmethod
    def parted(self, incarnation: Incarnation, instance: Instance) -> None:
        """What follows for those that wrote to an instance which is not there any more; the links' part."""

    def send(self, to: Incarnation, message: RouterToRole) -> None:
        """Tell an instance, unless it has left."""
        instance = self.cluster.instances.get(to)
        if instance is not None:
            self.change(to, said=instance.said + 1)
            self.do(Send(to, message))

    def pool(self, role: Role, model: str) -> list[tuple[Incarnation, Instance]]:
        """Instances of a role that serve `model`."""
        return [entry for entry in self.cluster.pool(role) if entry[1].register.model.id == model]

    def change(self, incarnation: Incarnation, **fields: Any) -> None:
        """Replace fields of an instance, if it is still there."""
        instance = self.cluster.instances.get(incarnation)
        if instance is not None:
            self.cluster.instances[incarnation] = replace(instance, **fields)

    def do(self, action: Action) -> None:
        """Want something done."""
        self.actions.append(action)

    def _remove(self, incarnation: Incarnation) -> Instance | None:
        instance = self.cluster.instances.pop(incarnation, None)
        if instance is not None:
            del self.cluster.names[instance.name]
            closing = self.cluster.closing.items()
            self.cluster.closing = {slot: by for slot, by in closing if incarnation not in (slot[0], by)}
            self.parted(incarnation, instance)
        return instance

    def _refuse(self, sender: Incarnation, reason: str, *, again: bool) -> None:
        self.do(Send(sender, Refused(again=again, reason=reason)))
        self.do(Count("refused", reason if again else "register"))
