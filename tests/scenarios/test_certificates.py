"""Certificates over the life of a node: revoked ones, renewed ones, and what a reload says it has done."""

from __future__ import annotations

import datetime as dt
import ssl
from contextlib import suppress
from pathlib import Path

import httpx
import pytest
import trustme
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization

from motorcade.broker.pem import certificate_ends, revocation_lists
from motorcade.core.errors import ConfigError
from tests.scenarios.transports import Papers, Ways, make_papers, open_ways
from tests.scenarios.witness import assert_no_crash, metrics
from tests.support.local import LocalNode

NOW = dt.datetime.now(dt.UTC).replace(microsecond=0)
DAY = dt.timedelta(days=1)


def write_crl(papers: Papers, *revoked: trustme.LeafCert, due: dt.datetime = NOW + 7 * DAY) -> Path:
    """A revocation list of the authority, in its file."""
    authority = x509.load_pem_x509_certificate(papers.authority.cert_pem.bytes())
    key = serialization.load_pem_private_key(papers.authority.private_key_pem.bytes(), None)
    builder = x509.CertificateRevocationListBuilder().issuer_name(authority.subject)
    builder = builder.last_update(NOW - 30 * DAY).next_update(due)
    for leaf in revoked:
        serial = x509.load_pem_x509_certificate(leaf.cert_chain_pems[0].bytes()).serial_number
        entry = x509.RevokedCertificateBuilder().serial_number(serial).revocation_date(NOW - DAY).build()
        builder = builder.add_revoked_certificate(entry)
    made = builder.sign(key, hashes.SHA256())  # type: ignore[arg-type]  # an EC key
    path = papers.folder / "crl.pem"
    path.write_bytes(made.public_bytes(serialization.Encoding.PEM))
    return path


def showing(papers: Papers, leaf: trustme.LeafCert) -> ssl.SSLContext:
    context = papers.trusting()
    leaf.configure_cert(context)
    return context


def let_in(ways: Ways, context: ssl.SSLContext) -> bool:
    """Tell whether the handshake and CONNECT succeed (in TLS 1.3 a refusal comes after the client's handshake)."""
    with suppress(ssl.SSLError, ConnectionError, AssertionError), ways.client("tls", context=context) as client:
        return 0 == client.connect("c").reason
    return False


def serial_of(ways: Ways, kind: str) -> int:
    """The server's certificate as a new connection sees it."""
    with ways.wire(kind) as wire:
        assert isinstance(wire, ssl.SSLSocket)
        der = wire.getpeercert(binary_form=True)
        assert der is not None
        return x509.load_der_x509_certificate(der).serial_number


def reload(ways: Ways) -> httpx.Response:
    with ways.node.web() as web:
        return web.post("/config/reload")


@pytest.fixture
def papers(tmp_path: Path) -> Papers:
    return make_papers(tmp_path)


def test_revoked_and_renewed_certificates_are_taken_by_a_reload(papers: Papers) -> None:
    """Without a restart, without dropping a connection; and the reload tells what it has done and what it has not."""
    good, bad = (papers.authority.issue_cert(f"{name}.example", common_name=name) for name in ("good", "bad"))
    crl = write_crl(papers)
    lines = papers.ca + f'crl = "{crl}"\nrequire_client_certificate = true\n'
    ways = open_ways(papers, lines)
    with ways.node, ways.client("tls", context=showing(papers, bad)) as connected:
        assert 0 == connected.connect("stays").reason
        assert let_in(ways, showing(papers, good))
        nothing = reload(ways).json()
        assert not any("certificates" in line for line in nothing["applied"]) and [] == nothing["restart"]

        write_crl(papers, bad)
        before = serial_of_both(ways, papers, good)
        server = papers.authority.issue_cert("localhost", "127.0.0.1", "::1")
        server.private_key_pem.write_to_path(papers.folder / "server.key")
        (papers.folder / "server.pem").write_bytes(b"".join(part.bytes() for part in server.cert_chain_pems))
        told = reload(ways).json()
        assert {"tls", "wss"} == {line.split()[1] for line in told["applied"] if "new certificates" in line}
        after = serial_of_both(ways, papers, good)
        assert before[0] != after[0] == x509.load_pem_x509_certificate(server.cert_chain_pems[0].bytes()).serial_number
        assert before[1] != after[1] == after[0]
        assert not let_in(ways, showing(papers, bad)), "a revoked certificate was let in"
        assert let_in(ways, showing(papers, good))
        connected.publish("a", b"1", 1)  # what was there before has not noticed

        (papers.folder / "server.key").write_text("no key")
        refused = reload(ways)
        assert (409, True) == (refused.status_code, "server.key" in refused.json()["message"])
        assert let_in(ways, showing(papers, good))
        expected = (NOW + 7 * DAY).timestamp()
        series = metrics(ways.node)
        assert expected == series['motorcade_certificate_expiry_timestamp_seconds{listener="tls",file="crl"}']
        ends = x509.load_pem_x509_certificate(server.cert_chain_pems[0].bytes()).not_valid_after_utc.timestamp()
        assert ends == series['motorcade_certificate_expiry_timestamp_seconds{listener="wss",file="certificate"}']
        assert_no_crash(ways.node)


def serial_of_both(ways: Ways, papers: Papers, leaf: trustme.LeafCert) -> tuple[int, int]:
    with ways.wire("tls", showing(papers, leaf)) as wire:
        assert isinstance(wire, ssl.SSLSocket)
        der = wire.getpeercert(binary_form=True)
    assert der is not None
    return x509.load_der_x509_certificate(der).serial_number, serial_of(ways, "wss")


def test_a_list_may_stand_in_the_file_of_the_authority_and_its_age_is_told(papers: Papers) -> None:
    """An old one refuses all clients with a certificate, as OpenSSL does: the log says why."""
    leaf = papers.authority.issue_cert("car.example", common_name="car")
    with (papers.folder / "ca.pem").open("ab") as file:
        file.write(write_crl(papers, due=NOW - DAY).read_bytes())
    with (ways := open_ways(papers, papers.ca)).node:
        assert not let_in(ways, showing(papers, leaf))
        assert let_in(ways, papers.trusting())  # a certificate is asked for, not demanded
        assert any("certificate_expired" in line for line in ways.node.output)
        series = metrics(ways.node)
        assert series['motorcade_certificate_expiry_timestamp_seconds{listener="tls",file="crl"}'] < NOW.timestamp()


def test_what_needs_a_restart_is_named_and_stays_named(papers: Papers) -> None:
    """Until the restart: a second reload does not make it done. A missing revocation list is told at the start."""
    config = "[session]\nwindow = 7\n[plugins.fanout]\ndispatchers = 4\n"
    with (ways := open_ways(papers, papers.ca, more=config)).node:
        assert any("no_revocation_list" in line for line in ways.node.output)
        file = Path(ways.node.command()[ways.node.command().index("--config") + 1])
        file.write_text(
            file.read_text().replace("window = 7", "window = 8").replace("dispatchers = 4", "dispatchers = 5")
        )
        for _ in range(2):
            told = reload(ways).json()
            assert 2 == len([line for line in told["restart"] if line.endswith("takes effect at the next start")])
            assert {"session.window", "plugins.fanout.dispatchers"} == {line.split()[0] for line in told["restart"]}
            assert "plugin retained reloaded" in told["applied"]


def test_a_revocation_list_needs_an_authority_and_must_be_one(papers: Papers) -> None:
    """Both are said at the start."""
    for lines, told in (
        (f'crl = "{papers.folder}/ca.pem"\n', "needs 'ca'"),
        (f'{papers.ca}crl = "{papers.folder}/ca.pem"\n', "no revocation list"),
        (f'{papers.ca}crl = "{papers.folder}/nowhere.pem"\n', "nowhere.pem does not exist"),
    ):
        section = f'[listeners.tls]\nbind = "127.0.0.1:0"\n{papers.tls}{lines}'
        with pytest.raises(ConfigError, match=told):
            LocalNode(section).start()


def test_dates_of_files_are_read_as_cryptography_reads_them(papers: Papers) -> None:
    """Of certificates and lists; a file that is cut off is refused, never misread."""
    pem = (papers.folder / "ca.pem").read_bytes() + (papers.folder / "server.pem").read_bytes()
    ends = [found.not_valid_after_utc.timestamp() for found in x509.load_pem_x509_certificates(pem)]
    assert ends == certificate_ends(pem)
    late = NOW + dt.timedelta(days=365 * 40)  # beyond 2049: another form of date
    assert [late.timestamp()] == revocation_lists(write_crl(papers, due=late).read_bytes())
    assert [] == revocation_lists(pem)
    for bad in (b"AAAA", b"MAA=", b"MAIwAA==", b"MIH/", b"!"):
        with pytest.raises(ValueError, match=r"not DER|no dates|base64"):
            certificate_ends(b"-----BEGIN CERTIFICATE-----\n" + bad + b"\n-----END CERTIFICATE-----\n")
