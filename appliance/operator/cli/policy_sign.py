"""``athanor policy sign``: puts a signature beside a policy."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from appliance.operator.cli.options import Output
from appliance.operator.cli.policy_sources import load_with_sources
from appliance.operator.cli.terminal import Format, output, print_data

SIGN_EXAMPLES = """
athanor policy sign policy.yaml --key policy.key | writes policy.yaml.sig, prints the public key for policy_keys
"""


def sign(
    path: Annotated[Path, typer.Argument(metavar="FILE", help="The policy: a file with its drop-ins, or a folder.")],
    key: Annotated[Path, typer.Option("--key", metavar="FILE", help="Private key; made when there is none.")],
    output_format: Output = Format.TABLE,
) -> None:
    """Check a policy, and sign it.

    The signature covers the texts of all its files, drop-ins and public prefixes included, and is
    written beside it. With policy_keys in athanor.yaml no other policy comes into force. The key is
    a file of 32 random bytes that only its owner may read; keep it away from the appliance.
    """
    from appliance.common.policy_signature import policy_signers, sign_policy
    from isolation.keys.signing import load_or_make

    policy, sources = load_with_sources(path, output_format)
    signing, _ = load_or_make(key)
    written = sign_policy(sources, path, signing)
    told = {
        "signatures": str(written),
        "public_key": signing.public.hex(),
        "digest": policy.digest,
        "signed_by": list(policy_signers(sources, path)),
    }
    if not print_data(told, output_format):
        output().print(signing.public.hex(), soft_wrap=True)
