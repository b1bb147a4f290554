"""A plugin for tests: refuses with many words, and authenticates in several steps.

user name `refused`             not authorised, with a long reason string
PUBLISH to talkative/refuse     refused with 0x99, a long reason string and user properties
method `steps`                  the client must answer each challenge n with b"answer n"; data of the first
                                message tells how many challenges there are, e.g. b"2"; b"no" is refused

An exchange that breaks off is remembered under its client id; a test that goes on takes another id.
"""

from __future__ import annotations

from motorcade.core.client import ClientInfo, Credentials
from motorcade.core.message import Message
from motorcade.core.reasons import ReasonCode
from motorcade.extension.hooks import Allow, Challenge, Deny, Handled, Stop
from motorcade.extension.plugin import Context, Plugin, hook

WORDS = "wordy " * 50


class Talkative(Plugin):
    """See the module."""

    def __init__(self, context: Context, config: object) -> None:
        super().__init__(context, config)
        self.open: dict[str, tuple[int, int]] = {}  # client id -> (challenge that was sent, number of challenges)

    @hook("client.authenticate")
    def authenticate(self, client: ClientInfo, credentials: Credentials, _acc: object) -> Stop | None:
        if client.username == "refused":
            return Stop(Deny(ReasonCode.NOT_AUTHORIZED, WORDS))
        if credentials.method != "steps":
            return None
        return Stop(self.step(client.client_id, credentials.data or b"0"))

    def step(self, client_id: str, data: bytes) -> Allow | Deny | Challenge:
        sent, total = self.open.pop(client_id, (0, 0))
        if data == b"no" or (sent and data != b"answer %d" % sent):
            return Deny(ReasonCode.NOT_AUTHORIZED, WORDS)
        if not sent:
            total = int(data)
        if sent == total:
            return Allow(data=b"welcome")
        self.open[client_id] = (sent + 1, total)
        return Challenge(b"challenge %d" % (sent + 1))

    @hook("message.publish", topics=("talkative/#",))
    def refuse(self, _client: ClientInfo | None, _message: Message) -> Stop:
        pairs = tuple((f"name {number}", WORDS) for number in range(3))
        return Stop(Handled(ReasonCode.PAYLOAD_FORMAT_INVALID, WORDS, pairs))
