"""What a cluster promises, checked against what clients of the model wrote down and what its cells have logged.

    I1  acknowledged after SUBACK: delivered            I5  first copies in order
    I2  decisions of a home form intervals              I6  one delivery of a vehicle under way: not here yet
    I3  no write of an incarnation after its fence      I7  the last value is that of the last acknowledged publish
    I4  QoS 2 at most once                              I8  progress

Rule 1: what a forgetting fail-over has lost excuses what concerns the homes of the calls that are gone, and nothing
        else. Where it has forgotten that a writer was fenced, that is all homes of the cell.
Rule 2: a receiver without a session has only what comes on its connection. What its publisher was told though a member
        had not confirmed in time is not owed if the publisher's member ends (`cluster.patience`).
Rule 3: the order of a publisher that has moved is that of two links for receivers without a session: it is not judged.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable

from motorcade.storage.homes import CLIENT
from tests.support.cell_store import WRITER, run
from tests.support.cluster_world import PATIENCE, ClusterWorld, HostNode
from tests.support.store_trace import violations
from tests.unit.cluster.model_clients import NEVER, BrokenPromiseError, Life, ModelClient, Publication

WILL = b"will"
PROBE = b"probe"


class Checker:
    """The promises."""

    def __init__(self, world: ClusterWorld, clients: list[ModelClient], publications: dict[bytes, Publication]) -> None:
        self.world = world
        self.clients = clients
        self.publications = publications
        self.checked: Counter[str] = Counter()  #: what was owed and has come, by kind

    # -- what a fail-over excuses

    def excused(self, *homes: str) -> bool:
        for lapse in self.world.cells.lapses:
            fences = any(home.startswith(WRITER) for home in lapse.homes)
            for home in homes:
                if lapse.concerns(home) or (fences and self.world.cells.of(home).number == lapse.cell):
                    return True
        return False

    # -- at any time

    def check_now(self) -> None:
        wrong = violations(self.world.cells.traces())  # I2, I3
        if wrong:
            raise BrokenPromiseError(f"fences: {wrong}")
        for client in self.clients:
            for life in client.lives:
                self._check_copies(life)

    def _check_copies(self, life: Life) -> None:
        """I4."""
        times = Counter(arrival.name for arrival in life.arrivals if arrival.qos == 2 and not arrival.retained)
        for name, count in times.items():
            publication = self.publications.get(name)
            if count < 2 or publication is None:
                continue
            if not self.excused(CLIENT + life.client, CLIENT + publication.publisher):
                raise BrokenPromiseError(f"I4: {life.client} got {publication!r} {count} times")

    # -- when all is well again

    def check_deliveries(self) -> None:
        """I1 and I5."""
        for client in self.clients:
            for life in client.lives:
                got = {arrival.name for arrival in life.arrivals if not arrival.retained}
                if life.durable or life is client.life:
                    self._check_owed(life, got)
                self._check_order(life)

    def _check_owed(self, life: Life, got: set[bytes]) -> None:
        for publication in self.publications.values():
            window = life.window_of(publication)
            if window is None:
                continue
            if publication.name in got:
                self.checked["durable" if life.durable else "live"] += 1
                continue
            if life.ended < NEVER or self._is_excused(life, publication):
                self.checked["excused"] += 1
                continue
            raise BrokenPromiseError(
                f"I1: {life.client} ({'durable' if life.durable else 'live'}) never got {publication!r}; "
                f"subscribed to {window.filter} at {window.granted:.3f}"
            )

    def _is_excused(self, life: Life, publication: Publication) -> bool:
        if self.excused(CLIENT + life.client):
            return True
        slow = publication.acknowledged - publication.sent[-1] >= PATIENCE
        return not life.durable and slow and self._has_ended(publication.through[-1])

    def _has_ended(self, node: HostNode) -> bool:
        return any(id_ == node.id for host in self.world.hosts for _, id_ in host.ended)

    def _check_order(self, life: Life) -> None:
        latest: dict[tuple[str, str, int], tuple[Publication, float]] = {}
        seen: set[bytes] = set()
        for arrival in life.arrivals:
            publication = self.publications.get(arrival.name)
            if arrival.retained or publication is None or not arrival.qos or arrival.name in seen:
                continue
            seen.add(arrival.name)
            if not self._began_within(life, publication):
                continue
            place = publication.publisher, publication.topic, arrival.qos
            before = latest.get(place)
            if before is not None and before[0].number > publication.number:
                moved = {*before[0].through, *publication.through}
                if not life.durable and len(moved) > 1:
                    continue
                if self.excused(CLIENT + life.client, CLIENT + publication.publisher):
                    continue
                raise BrokenPromiseError(f"I5: {life.client} got {before[0]!r} before {publication!r}")
            latest[place] = publication, arrival.at

    def _began_within(self, life: Life, publication: Publication) -> bool:
        return any(window.granted < publication.sent[0] < window.leaving for window in life.windows)

    # -- last values

    def allowed(self, topic: str) -> set[bytes]:
        """I7: return what a retained message may be now."""
        values = [each for each in self.publications.values() if each.retain and each.topic == topic]
        allowed: set[bytes] = {b""}
        for each in values:
            if each.acknowledged < NEVER:
                allowed = {each.name}
            elif each.sent:
                allowed.add(each.name)
        return allowed

    def check_retained(self, where: str, seen: dict[str, bytes], topics: Iterable[str]) -> None:
        for topic in topics:
            value = seen.get(topic, b"")
            if value not in self.allowed(topic) and not self.excused(topic):
                history = [each for each in self.publications.values() if each.retain and each.topic == topic]
                raise BrokenPromiseError(f"I7: {where} has {value!r} for {topic}, of {history}")
            self.checked["retained"] += 1

    # -- what is left

    def unread(self) -> list[str]:
        """I8: return the clients that are awake, and have entries."""
        found: list[str] = []
        for client in self.clients:
            cell = self.world.cells.of(CLIENT + client.name)
            box = cell.engine.mailboxes.boxes.get(f"session:{client.name}")
            forgotten = self.excused(CLIENT + client.name)  # that it had acknowledged them, perhaps
            if client.ready and box is not None and box.rows and not forgotten:
                found.append(f"{client.name} is awake, and has entries {list(box.rows)}")
        return found

    def left(self) -> list[str]:
        """I8: return what is left that nobody looks at."""
        world = self.world
        found = self.unread()
        live = {host.node.id for host in world.live if host.node is not None}
        for cell in world.cells.cells:
            for home, (member, fence) in cell.engine.mailboxes.attached.items():
                if member not in live:
                    found.append(f"{home} is attached to {member}, which is no more ({fence})")
            found += [
                f"{home} is due since {at:.3f}" for home, at in run(cell.engine.coordination.due(0, world.now, 9))
            ]
        for host in world.live:
            if host.node is not None:
                found += self._left_in(host.node, live)
        return found

    def _left_in(self, node: HostNode, live: set[str]) -> list[str]:
        found: list[str] = []
        assert node.member is not None and node.attachments is not None
        peers = node.member.links.peers
        found += [f"{node.id} has {link.unacknowledged} items to {link.id}" for link in peers if link.unacknowledged]
        found += [f"{node.id} has {len(link._asks)} questions to {link.id}" for link in peers if link._asks]
        if {link.id for link in peers} != live - {node.id}:
            found.append(f"{node.id} has links with {[link.id for link in peers]}, not {live}")
        if node.attachments._under_way or node.attachments._asked:
            found.append(f"{node.id} waits for {node.attachments._under_way} {node.attachments._asked}")
        if node.member.fenced():
            found.append(f"{node.id} still knows of {node.member.fenced()}")
        return found
