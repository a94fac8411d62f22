"""``athanor attest ask`` and ``verify``: what serves a tenant's requests, for the tenant itself."""

from __future__ import annotations

import secrets
import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from appliance.common.errors import reason_of
from appliance.operator.cli import exits
from appliance.operator.cli.audit import verifier_in
from appliance.operator.cli.options import Output
from appliance.operator.cli.terminal import Format, errors, fail, output, print_data

if TYPE_CHECKING:
    from appliance.common.audit.attestation import Attestation

ASK_EXAMPLES = """
athanor attest ask --url https://llm.example --model athanor-mini --key-file api.key --out a.attestation | a new nonce
athanor attest ask --url http://127.0.0.1:8080 --model athanor-mini --key-file api.key --nonce 9f86d081884c7d65 | yours
"""

VERIFY_EXAMPLES = """
athanor attest verify a.attestation --key public.key --nonce 9f86d081884c7d65 | it was made after the nonce was drawn
athanor attest verify a.attestation --key public.key --expect runtime=gvisor/systrap | and says what is expected
athanor attest verify a.attestation --key public.key --expect models.athanor-mini=DIGEST | of a model among all
"""

NONCE_BYTES = 16
"""Random bytes of a nonce that is drawn here."""


def ask(
    url: Annotated[str, typer.Option("--url", metavar="URL", help="Address of the HTTP API, without /v1.")],
    model: Annotated[str, typer.Option("--model", metavar="NAME", help="A model that you may use.")],
    key_file: Annotated[Path, typer.Option("--key-file", metavar="FILE", help="File with the tenant's API key.")],
    nonce: Annotated[
        str | None, typer.Option("--nonce", metavar="HEX", help="16 to 128 digits of 0-9 and a-f. [drawn at random]")
    ] = None,
    ca: Annotated[
        Path | None, typer.Option("--ca", metavar="FILE", help="Certificates to trust. [the system's]")
    ] = None,
    out: Annotated[
        Path | None, typer.Option("--out", metavar="FILE", help="Where to write it; without it to standard output.")
    ] = None,
) -> None:
    """Ask an appliance, as a tenant, what serves this tenant's requests.

    The answer is a text that the appliance's supervisor signs. It names every model that the tenant
    may use, the one of --model among them, and the tenant's own adapters. Its nonce is printed to standard
    error: verify with it, or an old attestation could be played back.
    """
    from appliance.operator.attest_client import AttestRefusedError, fetch_attestation

    drawn = nonce or secrets.token_hex(NONCE_BYTES)
    try:
        api_key = key_file.read_text(encoding="utf-8").strip()
    except (OSError, UnicodeDecodeError) as error:
        fail(exits.REFUSED, f"cannot read {key_file}: {error}")
    try:
        text = fetch_attestation(url, api_key, model, drawn, ca)
    except AttestRefusedError as error:
        fail(exits.REFUSED, str(error))
    if out is None:
        typer.echo(text, nl=False)
    else:
        try:
            out.write_text(text, encoding="utf-8")
        except OSError as error:
            fail(exits.REFUSED, f"cannot write {out}: {reason_of(error)}")
    errors().print(f"nonce {drawn}", soft_wrap=True, markup=False)


def verify(
    path: Annotated[Path, typer.Argument(metavar="FILE", help="The attestation.")],
    key: Annotated[Path, typer.Option("--key", metavar="FILE", help="The public key of the appliance's audit log.")],
    nonce: Annotated[str | None, typer.Option("--nonce", metavar="HEX", help="The nonce that was asked with.")] = None,
    expect: Annotated[
        list[str] | None,
        typer.Option(
            "--expect",
            metavar="FIELD=VALUE",
            help="A field must have this value, or models.NAME or adapters.NAME this digest; may be repeated.",
        ),
    ] = None,
    output_format: Output = Format.TABLE,
) -> None:
    """Verify that an attestation was signed by the appliance, and says what is expected.

    Offline: reads the files and nothing else. Without --nonce it may be an old one. It is the word
    of the host's operating system and its administrator; no hardware vouches for them. Attestations
    of earlier releases, which name one model, are verified as well.
    """
    from appliance.common.audit.attestation import mismatches

    one = _read(path, key)
    expected = _expected(expect or [], one)
    if nonce is not None:
        expected["nonce"] = nonce
    found = mismatches(one, expected)
    _show(one, found, output_format, fresh=nonce is not None)
    if found:
        raise typer.Exit(exits.REFUSED)


def _read(path: Path, key: Path) -> Attestation:
    from appliance.common.audit.attestation import MAX_ATTESTATION_BYTES, read_attestation
    from appliance.common.audit.signed_text import SignedTextError

    verifier = verifier_in(key)
    try:
        with path.open("rb") as file:
            return read_attestation(file.read(MAX_ATTESTATION_BYTES), verifier)
    except OSError as error:
        fail(exits.REFUSED, f"cannot read {path}: {reason_of(error)}")
    except SignedTextError as error:
        fail(exits.REFUSED, f"{path}: {error}")


def _expected(pairs: list[str], one: Attestation) -> dict[str, str]:
    from appliance.common.audit.attestation import ADAPTERS, MODELS, expectable

    known = [name for name in expectable(one) if not name.startswith((MODELS, ADAPTERS))]
    found = {}
    for pair in pairs:
        name, equals, value = pair.partition("=")
        if not equals or not (name in known or name.startswith((MODELS, ADAPTERS))):
            told = ", ".join((*known, f"{MODELS}NAME", f"{ADAPTERS}NAME"))
            fail(exits.USAGE, f"--expect {pair!r} is not FIELD=VALUE with one of the fields {told}")
        found[name] = value
    return found


def _show(one: Attestation, found: list[str], output_format: Format, *, fresh: bool) -> None:
    from appliance.common.audit.attestation import facts

    if print_data({"ok": not found, "fresh": fresh and not found, **facts(one), "mismatches": found}, output_format):
        return
    from appliance.operator.cli.attest_view import attest_view

    console = output()
    console.print(attest_view(one, time.time()))
    for line in found:
        console.print(line, style="red", soft_wrap=True, markup=False)
    if found:
        console.print("not what is expected", style="bold")
    elif fresh:
        console.print("the signature holds, and the nonce is yours", style="bold")
    else:
        console.print("the signature holds; without --nonce it may be an old one", style="bold")
