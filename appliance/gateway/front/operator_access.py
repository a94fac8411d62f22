"""Identity and roles of an operator on another machine: by client certificate, by token, or by both.

A certificate's credential is its one URI, a SPIFFE id; without any URI its one DNS name or mail address. A token's
credentials are the values of its claim for roles, and ``sub`` names its bearer. Where both are shown, a role counts
that both have; a certificate that names nobody counts as none. A credential that the configuration does not list has no
role: there is no default.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime

from appliance.common.errors import UnauthenticatedError
from appliance.common.operator_config import RemoteOperatorsConfig
from appliance.common.operator_roles import OperatorRole, with_reading
from appliance.common.refused_credentials import CredentialRefusal
from appliance.common.token_claims import TokenError
from appliance.gateway.front.auth import MAX_AUTHORIZATION_CHARS, MAX_SPIFFE_CHARS, SPIFFE_ID
from appliance.gateway.front.tokens import TokenVerifier

SECTION = "remote_operators"
"""Section of the configuration that gives these roles."""

PeerNames = Sequence[tuple[str, str]]
"""Alternative names of a certificate, as Python's ``ssl`` tells them: kind and text."""

_OTHERS = {"DNS": "dns:", "email": "email:"}
"""Kinds of names that stand in for a URI, and their beginnings in the configuration."""


@dataclass(frozen=True, slots=True)
class RemoteOperator:
    """An operator whose proof holds."""

    who: str
    """Credential of the certificate, or ``oidc:ISSUER:SUBJECT``; for the audit log."""
    roles: frozenset[OperatorRole]
    """None at all where nothing lists them."""

    @property
    def shown_roles(self) -> str:
        """The roles as the audit log has them."""
        return ",".join(sorted(self.roles))


class OperatorResolver:
    """Turns proofs into operators, by the roles in force at the moment of the call."""

    def __init__(
        self,
        tokens: TokenVerifier,
        roles: Callable[[], RemoteOperatorsConfig | None],
        now: Callable[[], datetime] = lambda: datetime.now(UTC),
    ) -> None:
        """``roles`` gives the section in force; None: nobody has a role."""
        self._tokens = tokens
        self._roles = roles
        self._now = now

    def resolve(self, authorization: Sequence[str], names: PeerNames | None) -> RemoteOperator:
        """Return who calls.

        Args:
            authorization: the values of every such header.
            names: those of a verified client certificate; None where there is none.

        Raises:
            UnauthenticatedError: no proof, or one that does not hold; ``refusal`` says which to the operator.
        """
        by_certificate = None if names is None else certificate_credential(names)
        if not authorization:
            if not by_certificate:
                raise _refusal(CredentialRefusal.ABSENT if names is None else CredentialRefusal.CERTIFICATE)
            return RemoteOperator(by_certificate, self._roles_of({by_certificate}))
        who, grounds = self._by_token(authorization)
        roles = self._roles_of(grounds)
        return RemoteOperator(who, roles & self._roles_of({by_certificate}) if by_certificate else roles)

    def _by_token(self, authorization: Sequence[str]) -> tuple[str, frozenset[str]]:
        value = authorization[0] if len(authorization) == 1 else ""
        scheme, _, plain = value.partition(" ") if len(value) <= MAX_AUTHORIZATION_CHARS else ("", "", "")
        if scheme.lower() != "bearer":
            raise _refusal(CredentialRefusal.MALFORMED)
        try:
            claims = self._tokens.check(plain, self._now().timestamp()).claims
        except TokenError as error:
            raise _refusal(error.refusal) from None
        return claims.credential, claims.grounds

    def _roles_of(self, credentials: Iterable[str]) -> frozenset[OperatorRole]:
        section, held = self._roles(), frozenset(credentials)
        return with_reading(() if section is None else (role for role, name in section.listed() if name in held))


def certificate_credential(names: PeerNames) -> str:
    """Return the credential in the alternative names of a verified certificate; empty where they name nobody, or more
    than one."""
    uris = [text for kind, text in names if kind == "URI"]
    if uris:
        uri = uris[0] if len(uris) == 1 else ""
        return uri if len(uri) <= MAX_SPIFFE_CHARS and SPIFFE_ID.fullmatch(uri) else ""
    others = [f"{_OTHERS[kind]}{text}" for kind, text in names if kind in _OTHERS]
    return others[0] if len(others) == 1 else ""


def _refusal(reason: CredentialRefusal) -> UnauthenticatedError:
    error = UnauthenticatedError(
        "no valid credential of an operator; connect with a client certificate of the operators' authority, or send a"
        " token of one of their issuers as 'authorization: Bearer eyJ...'"
    )
    error.refusal = reason
    return error
