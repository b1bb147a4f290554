"""Ways to authenticate. Each may allow, deny, or pass on to the next one by answering None.

Rule 1: passing on is always safe. A client that shows a name, password or token which no backend accepts is refused
at the end of the chain, so a backend passes on whatever is not for it.
Rule 2: what a backend allows, it vouches for: the user name in its answer (or, if that is None, the one the client
gave) counts in access rules. A backend that cannot vouch for the name the client gave answers with username "".
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from motorcade.core.client import ClientInfo, Credentials
from motorcade.core.errors import AccessFileError
from motorcade.extension.hooks import Allow, Deny
from motorcade.plugins.access import config as options

ACL_ATTRIBUTE = "acl-claim"  #: client attribute that carries the rules of a token, as JSON


@dataclass(frozen=True, slots=True)
class Accepted:
    """A client that is let in, and the client id its token names (None if it names none)."""

    allow: Allow
    claimed_client_id: str | None = None


Answer = Accepted | Deny | None


class Backend(Protocol):
    """One link of the chain."""

    name: str

    async def check(self, client: ClientInfo, credentials: Credentials, now: float, flow: str = "") -> Answer:
        """Decide, or pass on with None. `now` in seconds since the epoch; work is queued fairly by `flow`."""

    def remembered(self, client: ClientInfo, credentials: Credentials, now: float) -> Accepted | None:
        """Return the earlier answer to the same credentials, if they were accepted a short while ago; takes no time."""

    async def close(self) -> None:
        """Give back threads and connections."""


def build(config: options.AnyBackend) -> Backend:
    """Make a backend, reading its files. `AccessFileError` if one is wrong or a package is missing."""
    try:
        return _build(config)
    except ImportError as error:
        kind = type(config).__name__.lower()
        raise AccessFileError(
            f"authentication by {kind} needs the package {error.name}: pip install 'motorcade[access]'"
        ) from error


def _build(config: options.AnyBackend) -> Backend:
    # Imported when wanted: the packages behind them are an extra, and a node without authentication does without.
    match config:
        case options.Password():
            from motorcade.plugins.access.backends.password import PasswordBackend  # noqa: PLC0415

            return PasswordBackend(config)
        case options.Jwt():
            from motorcade.plugins.access.backends.token import TokenBackend  # noqa: PLC0415

            return TokenBackend(config)
        case options.Http():
            from motorcade.plugins.access.backends.service import ServiceBackend  # noqa: PLC0415

            return ServiceBackend(config)
        case options.ClientCertificate():
            from motorcade.plugins.access.backends.certificate import CertificateBackend  # noqa: PLC0415

            return CertificateBackend(config)
