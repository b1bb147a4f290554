"""Every way in: TCP, TLS, WebSocket, WebSocket over TLS, IPv4 and IPv6; and what is said when one cannot be opened."""

from __future__ import annotations

import socket
import ssl
import struct
import threading
import urllib.request
import uuid
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

from motorcade.core.errors import MotorcadeError
from tests.scenarios.transports import (
    BINARY,
    CLOSE,
    CONFIG,
    CONT,
    KINDS,
    PING,
    PONG,
    AnyClient,
    HandshakeError,
    Papers,
    Served,
    Ways,
    WebSocket,
    every_kind,
    frame,
    make_papers,
    open_ways,
)
from tests.scenarios.witness import SLACK, assert_no_crash, metrics, refusals, rss, wait_until
from tests.support.flows import numbered, payloads, publish_many, receive_until
from tests.support.local import LocalNode
from tests.support.node import Endpoint, NodeProcess
from tests.support.ports import free_port
from tests.support.tables import each_case
from tests.support.wire import (
    CONNACK,
    PATIENCE,
    PINGREQ,
    PUBLISH,
    Client,
    Will,
    connect_packet,
    publish_packet,
    subscribe_packet,
)


@pytest.fixture(scope="module")
def papers(tmp_path_factory: pytest.TempPathFactory) -> Papers:
    return make_papers(tmp_path_factory.mktemp("papers"))


@pytest.fixture(scope="module")
def ways(papers: Papers) -> Iterator[Ways]:
    """Client certificates are asked for on `tls`, not on `wss`."""
    open_ = open_ways(papers, tls=papers.ca)
    with open_.node:
        yield open_
        assert_no_crash(open_.node)


Dial = Callable[..., AnyClient]


@pytest.fixture
def dial(ways: Ways, name: str) -> Iterator[Dial]:
    """`dial(kind, version=5, context=None)`: a client that was let in, closed at the end."""
    with ExitStack() as stack:
        count = 0

        def dialled(kind: str, version: int = 5, context: ssl.SSLContext | None = None) -> AnyClient:
            nonlocal count
            count += 1
            client = stack.enter_context(ways.client(kind, version, context))
            assert 0 == client.connect(f"{name}-{count}").reason
            return client

        yield dialled


@pytest.fixture
def name() -> str:
    return "l" + uuid.uuid4().hex[:12]


# --- messages over each of them -----------------------------------------------------------------------------------


SMALL, MIXED = (6,), (6, 90, 125, 126, 4000, 16_384, 65_535, 65_536, 200_000)


@every_kind
def test_a_thousand_messages_arrive_complete_and_in_order(dial: Dial, name: str, kind: str) -> None:
    """Numbered QoS 1 messages of all sizes, one client sending while the other one takes them."""
    for version, sizes, count in ((4, SMALL, 1000), (5, MIXED, 500)):
        sender, taker = dial(kind, version), dial(kind, version)
        taker.subscribe(name, 1)
        sent = [number.ljust(sizes[n % len(sizes)], b".") for n, number in enumerate(numbered(count))]
        sending = threading.Thread(target=publish_many, args=(sender, name, sent, 1), daemon=True)
        sending.start()
        got = payloads(receive_until(taker, sent[-1]))
        sending.join(PATIENCE)
        assert not sending.is_alive()
        assert len(sent) == len(got)
        assert sent == got
        taker.expect_nothing()
        taker.close()


def test_messages_cross_from_one_way_to_all_others(ways: Ways, dial: Dial, name: str) -> None:
    """A message that came in one way goes out by all, at each QoS. Operators see by which way a client came."""
    takers = {kind: dial(kind) for kind in KINDS}
    for taker in takers.values():
        taker.subscribe(name, 2)
    for kind in KINDS:
        sender = dial(kind, 4)
        for qos in (0, 1, 2):
            sender.publish(name, b"from %s at %d" % (kind.encode(), qos), qos)
            for taker in takers.values():
                message = taker.receive()
                assert (b"from %s at %d" % (kind.encode(), qos), qos) == (message.payload, message.qos)
    with ways.node.web() as web:
        for kind, taker in takers.items():
            assert kind == web.get(f"/clients/{taker.client_id}").json()["client"]["listener"]


@every_kind
def test_a_reader_that_pauses_costs_no_memory(ways: Ways, dial: Dial, name: str, kind: str) -> None:
    """200 MB for a client that does not read: dropped and counted, not kept; when it reads, it is served again."""
    node = ways.node
    dropped = 'motorcade_messages_dropped_total{reason="slow_consumer"}'
    sender, taker = dial(kind), dial(kind)
    taker.subscribe(name, 1)
    before, drops = rss(node), metrics(node)[dropped]
    bulk = b"." * 50_000
    for number in range(4000):
        sender.send(publish_packet(name, b"%05d" % number + bulk))
    sender.publish(f"{name}/other", b"", 1)  # everything before has been taken
    assert rss(node) < before + SLACK, f"{before >> 20} MiB before, {rss(node) >> 20} MiB with a client that stopped"
    assert metrics(node)[dropped] > drops
    sender.publish(name, b"last", 1)
    got = [message.payload for message in receive_until(taker, b"last")]
    numbers = [int(payload[:5]) for payload in got[:-1]]
    assert numbers == sorted(set(numbers))
    assert all(len(payload) == 5 + len(bulk) for payload in got[:-1])
    sender.publish(name, b"after", 0)
    assert b"after" == taker.receive().payload


@every_kind
def test_a_connection_that_ends_in_the_middle_leaves_nothing(ways: Ways, name: str, kind: str) -> None:
    """Half a handshake, half a CONNECT, half a message, then the end: the node forgets them all."""
    endpoint = ways.at[kind]
    for _ in range(20):
        with socket.create_connection((endpoint.host, endpoint.port), timeout=PATIENCE) as plain:
            plain.sendall(b"\x16\x03\x01\x02\x00\x01" if kind in ("tls", "wss") else b"GET /mq")
    for cut in (1, 5, -1):
        with ways.client(kind) as half:
            half.send(connect_packet(name)[:cut])
        with ways.client(kind) as half:
            assert 0 == half.connect(f"{name}{cut}").reason
            half.send(publish_packet(name, b"x" * 100)[:cut])
    wait_until(lambda: metrics(ways.node)["motorcade_connections"] == 0, "all connections are gone")


# --- TLS ----------------------------------------------------------------------------------------------------------


both_secure = each_case("kind", ["tls", "wss"])


@both_secure
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_tls_versions(ways: Ways, papers: Papers, name: str, kind: str) -> None:
    """1.2 and 1.3 are spoken. Older ones the node refuses: a client that could not try would fail otherwise."""
    for version in (ssl.TLSVersion.TLSv1_2, ssl.TLSVersion.TLSv1_3):
        context = papers.trusting()
        context.minimum_version = context.maximum_version = version
        with ways.wire(kind, context) as wire:
            assert isinstance(wire, ssl.SSLSocket)
            assert wire.version() == {"TLSv1_2": "TLSv1.2", "TLSv1_3": "TLSv1.3"}[version.name]
            client = AnyClient(WebSocket(wire) if kind == "wss" else wire)
            assert 0 == client.connect(name).reason
            client.expect_nothing()
    for version in (ssl.TLSVersion.TLSv1, ssl.TLSVersion.TLSv1_1):
        context = papers.trusting()
        context.set_ciphers("ALL:@SECLEVEL=0")  # or the client would not even try
        context.minimum_version = context.maximum_version = version
        with pytest.raises((ssl.SSLError, ConnectionResetError), match=r"PROTOCOL_VERSION|EOF occurred|reset by peer"):
            ways.wire(kind, context)


@both_secure
def test_a_client_that_trusts_another_authority_does_not_connect(ways: Ways, papers: Papers, kind: str) -> None:
    """Its alert hurts nobody, and it counts as nobody."""
    with pytest.raises(ssl.SSLCertVerificationError):
        ways.wire(kind, papers.trusting(papers.stranger))
    with ways.client(kind) as client:
        assert 0 == client.connect("trusts").reason


@both_secure
def test_plain_bytes_on_a_tls_port_are_closed(ways: Ways, kind: str) -> None:
    """MQTT and HTTP without TLS get at most an alert."""
    endpoint = ways.at[kind]
    for said in (connect_packet("plain"), b"GET /mqtt HTTP/1.1\r\nHost: localhost\r\n\r\n"):
        with socket.create_connection((endpoint.host, endpoint.port), timeout=PATIENCE) as plain:
            plain.sendall(said)
            answer = b""
            try:
                while data := plain.recv(4096):
                    answer += data
            except ConnectionResetError:
                pass
            assert answer == b"" or answer[0] == 0x15, answer


def test_a_tls_client_that_does_not_shake_hands_is_let_go(papers: Papers) -> None:
    """A connection that stays silent before or during the TLS handshake ends with the time for CONNECT."""
    ways = open_ways(papers, more="[limits]\nconnect_timeout = 1.0\n")
    with ways.node:
        for said in (b"", b"\x16\x03\x01\x02\x00\x01\x00"):
            endpoint = ways.at["tls"]
            with socket.create_connection((endpoint.host, endpoint.port), timeout=20) as plain:
                plain.sendall(said)
                try:
                    assert b"" == plain.recv(100)
                except ConnectionResetError:
                    pass


def shut_out(ways: Ways, kind: str, context: ssl.SSLContext) -> None:
    """Not let in: TLS 1.2 says so in the handshake, TLS 1.3 at the first read after it."""
    with pytest.raises((ssl.SSLError, ConnectionResetError, HandshakeError)):  # noqa: PT012 - either place will do
        wire = ways.wire(kind, context)
        with wire:
            wire.sendall(connect_packet("unknown"))
            if not wire.recv(100):
                raise ConnectionResetError


def test_a_client_certificate_may_be_asked_for(ways: Ways, papers: Papers, dial: Dial) -> None:
    """With `ca` a client may show a certificate or none, but not one of another authority."""
    for version in (ssl.TLSVersion.TLSv1_2, ssl.TLSVersion.TLSv1_3):
        none, good, wrong = papers.trusting(), papers.showing("car-1"), papers.showing("car-1", papers.stranger)
        for context in (none, good, wrong):
            context.minimum_version = context.maximum_version = version
        dial("tls", 5, none).expect_nothing()
        dial("tls", 5, good).expect_nothing()
        shut_out(ways, "tls", wrong)


def test_a_client_certificate_may_be_required(papers: Papers, tmp_path: Path) -> None:
    """Without a certificate of the right authority nobody gets in; the common name decides what one may do."""
    rules = tmp_path / "acl.conf"
    rules.write_text('{allow, all, all, ["cars/${cert_common_name}/#"]}.\n')
    required = papers.ca + "require_client_certificate = true\n"
    access = f"""{CONFIG}
[plugins.access]
anonymous = "deny"
acl_file = "{rules}"
authentication = [{{ type = "certificate" }}]
"""
    ways = open_ways(papers, required, required, access)
    with ways.node:
        for kind in ("tls", "wss"):
            shut_out(ways, kind, papers.trusting())
            shut_out(ways, kind, papers.showing("car-7", papers.stranger))
            with ways.client(kind, context=papers.showing("car-7")) as car:
                assert 0 == car.connect("some-id").reason
                assert [1] == car.subscribe("cars/car-7/#", 1).reasons
                assert [0x87] == car.subscribe("cars/car-8/#", 1).reasons
                car.publish("cars/car-7/gps", b"here", 1)
                assert b"here" == car.receive().payload
        with ways.client("tcp") as anonymous:
            assert 0 != anonymous.connect("some-id").reason
        assert_no_crash(ways.node)


# --- WebSocket ----------------------------------------------------------------------------------------------------

both_websockets = each_case("kind", ["ws", "wss"])


@both_websockets
def test_the_path_and_the_subprotocol(ways: Ways, name: str, kind: str) -> None:
    """`/mqtt`, with or without a query; `mqtt` is chosen, and MQTT 3.1's own name when that is all there is.

    Another path is 404, with a word about where MQTT is.
    """
    for path, offered, chosen in (
        ("/mqtt", "mqtt", "mqtt"),
        ("/mqtt?token=1", "mqtt", "mqtt"),
        ("/mqtt", "chat, mqtt", "mqtt"),
        ("/mqtt", "mqttv3.1", "mqttv3.1"),
        ("/mqtt", None, None),
    ):
        opened = WebSocket(ways.wire(kind), path, offered)
        assert chosen == opened.subprotocol
        with AnyClient(opened) as client:
            assert 0 == client.connect(name).reason
    for path in ("/", "/mqtt/", "/MQTT", "/mqtt/other", "/other?/mqtt"):
        with pytest.raises(HandshakeError) as refused:
            WebSocket(ways.wire(kind), path)
        assert (404, True) == (refused.value.status, b"/mqtt" in refused.value.body), path


def test_path_and_origins_can_be_configured(papers: Papers) -> None:
    """Browsers say where their page is from; with `origins` only those pages get in, and what is no browser."""
    own = 'path = "/fleet"\norigins = ["https://fleet.example"]\n'
    ways = open_ways(papers, wss=own)
    with ways.node:
        for origin in ("https://fleet.example", None):
            with AnyClient(WebSocket(ways.wire("wss"), "/fleet", origin=origin)) as client:
                assert 0 == client.connect("page").reason
        for origin in ("https://evil.example", "http://fleet.example", "https://fleet.example:8443", "null"):
            with pytest.raises(HandshakeError) as refused:
                WebSocket(ways.wire("wss"), "/fleet", origin=origin)
            assert 403 == refused.value.status
        with pytest.raises(HandshakeError) as refused:
            WebSocket(ways.wire("wss"), "/mqtt")
        assert 404 == refused.value.status
        for origin in ("https://evil.example", "null", "http://["):
            with pytest.raises(HandshakeError) as refused:  # without a list, pages of the same host
                WebSocket(ways.wire("ws"), origin=origin)
            assert 403 == refused.value.status
        AnyClient(WebSocket(ways.wire("ws"), origin="http://localhost:3000")).close()


@both_websockets
def test_fragments_with_pings_between_them(dial: Dial, name: str, kind: str) -> None:
    """Fragmented messages of all sizes; pings between the fragments are answered in order, with their data."""
    client = dial(kind)
    client.subscribe(name, 0)
    raw = client.websocket.sock
    for number, size in enumerate((0, 1, 125, 126, 65_536, 500_000)):
        payload = bytes(n % 251 for n in range(size))
        packet = publish_packet(name, payload)
        third = len(packet) // 3
        raw.sendall(
            frame(BINARY, packet[:third], 0)
            + frame(PING, b"%d-a" % number)
            + frame(CONT, packet[third : 2 * third], 0)
            + frame(CONT, b"", 0)
            + frame(PING, b"%d-b" % number)
            + frame(CONT, packet[2 * third :])
        )
        assert payload == client.expect(PUBLISH).payload
        client.expect_nothing()
        assert [(PONG, b"%d-a" % number), (PONG, b"%d-b" % number)] == list(client.websocket.control)
        client.websocket.control.clear()


@both_websockets
def test_the_closing_handshake_of_a_client_is_answered(dial: Dial, kind: str) -> None:
    """A close frame gets one back with its code, then the connection ends."""
    client = dial(kind)
    client.websocket.sock.sendall(frame(CLOSE, struct.pack("!H", 1000) + b"bye"))
    assert [] == client.expect_closed()
    assert [(CLOSE, struct.pack("!H", 1000))] == [(code, data[:2]) for code, data in client.websocket.control]


@both_websockets
def test_a_will_is_published_when_a_websocket_ends_without_disconnect(
    ways: Ways, dial: Dial, name: str, kind: str
) -> None:
    """A close frame is no DISCONNECT: the MQTT client said no goodbye."""
    watcher = dial("tcp")
    watcher.subscribe(name, 0)
    with ways.client(kind) as leaving:
        assert 0 == leaving.connect(f"{name}-w", will=Will(name, b"gone")).reason
        leaving.websocket.sock.sendall(frame(CLOSE, struct.pack("!H", 1001)))
        leaving.expect_closed()
    assert b"gone" == watcher.receive().payload


@both_websockets
def test_the_node_says_goodbye_with_a_close_frame(ways: Ways, dial: Dial, kind: str) -> None:
    """A client that is sent away gets DISCONNECT, a close frame, and the end."""
    client = dial(kind)
    client.send(connect_packet("again"))  # a second CONNECT
    assert [0x82] == [packet.reason for packet in client.expect_closed()]
    assert [CLOSE] == [code for code, _ in client.websocket.control]


@both_websockets
def test_many_packets_in_one_frame_and_many_messages_at_once(dial: Dial, name: str, kind: str) -> None:
    """Input need not be one packet per frame, and output of one turn is not one frame per packet."""
    client = dial(kind)
    sent = numbered(500)
    client.send(
        subscribe_packet(9, [(name, 0)]) + b"".join(publish_packet(name, payload) for payload in sent) + PINGREQ
    )
    assert 9 == client.recv().packet_id
    frames = client.websocket.frames
    assert sent == [client.expect(PUBLISH).payload for _ in sent]
    assert client.websocket.frames - frames < len(sent)


# --- addresses ----------------------------------------------------------------------------------------------------


def test_ipv6_loopback(papers: Papers, name: str) -> None:
    """TCP, TLS and WebSocket at [::1], and the address is told as it is written."""
    at = {kind: Endpoint("::1", free_port("::1")) for kind in ("tcp", "ws", "http")}
    secure = Endpoint("::1", free_port("::1"))
    config = papers.folder / "v6.toml"
    config.write_text(f'[listeners.tls]\nbind = "{secure}"\n{papers.tls}')
    node = Served(
        *("--mqtt", str(at["tcp"]), "--ws", str(at["ws"]), "--http", str(at["http"])),
        *("--config", str(config), "--data", str(papers.folder / "data")),
    )
    with node:
        ways = Ways(node, {**at, "tls": secure}, papers)
        for kind in ("tcp", "tls", "ws"):
            with ways.client(kind) as client:
                assert 0 == client.connect(name).reason
                client.expect_nothing()
        with urllib.request.urlopen(f"http://{at['http']}/readyz", timeout=60) as answer:
            assert 200 == answer.status
        expected = {kind: [str(endpoint)] for kind, endpoint in {**at, "tls": secure}.items()}
        assert expected == node.addresses()


def test_several_addresses_and_ports_that_the_system_chooses(papers: Papers, tmp_path: Path, name: str) -> None:
    """A list of addresses, port 0 among them: each is served, and the `ready` line tells the real ports."""
    config = tmp_path / "several.toml"
    config.write_text(f"""
[listeners.tcp]
bind = ["127.0.0.1:0", "127.0.0.1:0", "[::1]:0"]
[listeners.ws]
bind = ["127.0.0.1:0", "[::1]:0"]
[listeners.tls]
bind = ["127.0.0.1:0"]
{papers.tls}
[http]
bind = ["127.0.0.1:0"]
""")
    with Served("--config", str(config), "--data", str(tmp_path / "data")) as node:
        told = node.addresses()
        assert {"tcp": 3, "ws": 2, "tls": 1, "http": 1} == {kind: len(at) for kind, at in told.items()}
        for kind in ("tcp", "tls", "ws"):
            for text in told[kind]:
                host, _, port = text.rpartition(":")
                endpoint = Endpoint(host.strip("[]"), int(port))
                assert endpoint.port != 0
                with Ways(node, {kind: endpoint}, papers).client(kind) as client:
                    assert 0 == client.connect(name).reason
        with urllib.request.urlopen(f"http://{told['http'][0]}/readyz", timeout=60) as answer:
            assert 200 == answer.status


def test_listeners_that_are_off_are_not_there() -> None:
    """`off` opens nothing; with all of them off there would be no node."""
    with NodeProcess("--mqtt", "off", ws=True) as node:
        assert node.ws is not None
        with pytest.raises(ConnectionRefusedError):
            Client(node.mqtt)
        with AnyClient(WebSocket(socket.create_connection((node.ws.host, node.ws.port), timeout=PATIENCE))) as client:
            assert 0 == client.connect("only-ws").reason


# --- what cannot be opened ----------------------------------------------------------------------------------------


def refusal(flags: dict[str, object], config: str = "") -> str:
    """What a node says that must not start."""
    with pytest.raises(MotorcadeError) as caught:
        LocalNode(config, flags=flags).start()
    return str(caught.value)


def test_an_address_that_cannot_be_had_is_named() -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        address = f"127.0.0.1:{taken.getsockname()[1]}"
        for key in ("listeners.tcp.bind", "listeners.ws.bind", "http.bind"):
            said = refusal({key: address})
            assert address in said and "in use" in said, key
    for address in ("192.0.2.1:0", "no-such-host.invalid:1883"):  # the first is no address of this machine
        assert address.partition(":")[0] in refusal({"listeners.tcp.bind": address})
    assert "off" in refusal({"listeners.tcp.bind": "off"})


def test_a_certificate_that_cannot_be_used_is_named(papers: Papers, tmp_path: Path) -> None:
    """A file that is missing or no PEM, and a key of another certificate."""
    broken, other = tmp_path / "broken.pem", tmp_path / "other.key"
    broken.write_text("this is no certificate\n")
    papers.authority.issue_cert("other.example").private_key_pem.write_to_path(other)
    right = {name: str(papers.folder / file) for name, file in FILES.items()}
    for kind in ("tls", "wss"):
        for name in FILES:
            for path in ("/nowhere/missing.pem", str(broken)):
                said = refusal({}, secure(kind, right | {name: path}))
                assert path in said and (path == str(broken) or name in said), (kind, name)
    assert str(other) in refusal({}, secure("tls", right | {"key": str(other)}))


FILES = {"certificate": "server.pem", "key": "server.key", "ca": "ca.pem"}


def secure(kind: str, files: dict[str, str]) -> str:
    lines = "".join(f'{key} = "{path}"\n' for key, path in files.items())
    return f'[listeners.{kind}]\nbind = "127.0.0.1:0"\n{lines}'


# --- limits of one listener ---------------------------------------------------------------------------------------


def test_a_full_listener_leaves_the_others_open(papers: Papers) -> None:
    """`max_connections` of each kind: the next is closed, other kinds are served, and who leaves makes room."""
    limit = "max_connections = 2\n"
    ways = open_ways(papers, limit, limit, "".join(f"[listeners.{kind}]\n{limit}" for kind in ("tcp", "ws")))
    with ways.node:
        for number, kind in enumerate(KINDS):
            with ExitStack() as stack:
                inside = [stack.enter_context(ways.client(kind)) for _ in range(2)]
                for client in inside:
                    assert 0 == client.connect(f"inside-{id(client)}").reason
                with pytest.raises((OSError, AssertionError)):
                    stack.enter_context(ways.client(kind)).connect("outside")
                assert number + 1 == refusals(ways.node, "max_connections")
                for other in set(KINDS) - {kind}:
                    with ways.client(other) as client:
                        assert 0 == client.connect(f"by-{other}").reason
                inside[0].disconnect()
                wait_until(lambda kind=kind: let_in(ways, kind), "there is room again")  # type: ignore[misc]
                inside[1].expect_nothing()
            wait_until(lambda: metrics(ways.node)["motorcade_connections"] == 0, "all are gone")


def let_in(ways: Ways, kind: str) -> bool:
    try:
        with ways.client(kind) as client:
            client.send(connect_packet("later"))
            return client.expect(CONNACK).reason == 0
    except (OSError, AssertionError):
        return False
