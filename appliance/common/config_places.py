"""Sections of the configuration about folders: models, tenants' files, spilled blocks, the audit log, keys."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal, Self

from pydantic import Field, model_validator

from appliance.common.config_section import BYTES, Section, Unit


class ModelCacheConfig(Section):
    """Cache of models that were pulled (`athanor model pull`), each under its digest."""

    directory: Path = Field(strict=False)
    """Folder of the cache. It belongs to the downloader's user and is readable for all with access."""
    max_bytes: Annotated[int, Field(ge=0), BYTES] = 0
    """Most bytes of models in the cache. A pull that needs room removes models that are neither pinned nor named here,
    the least recently used first. 0: as many as the disk takes."""
    max_rate: Annotated[int, Field(ge=0), Unit("bytes per second")] = 0
    """Bandwidth of all pulls together. 0: no limit."""
    sources: Path | None = Field(default=None, strict=False)
    """File of endpoints and credentials of sources (docs/model-cache.md); under systemd a credential. Left out: what
    the providers' own environment variables say."""
    socket: Path | None = Field(default=None, strict=False)
    """Socket of athanor-fetch.service. Left out: `fetch.sock` in run_dir while `athanor serve` runs, and otherwise
    `athanor model pull` starts a downloader for itself."""


class BatchesConfig(Section):
    """Files and batches of tenants (docs/batches.md), sealed under the tenants' keys: the sections `keys` and `audit`
    are needed."""

    directory: Path = Field(strict=False)
    """Folder of the files and batches; it belongs to the supervisor's user alone."""
    max_bytes: Annotated[int, Field(ge=1 << 20), BYTES] = 16 << 30
    """Bytes that all tenants together may keep. The policy says how many each may (`max_stored_bytes`)."""


class HostConfig(Section):
    """What the machine costs, for `athanor usage --cost` (docs/usage.md)."""

    price_per_hour: Annotated[float, Field(ge=0, le=1_000_000), Unit("units of currency per hour")]
    """Price of an hour in which the appliance runs, whatever it serves."""
    currency: Annotated[str, Field(pattern=r"^([A-Z][A-Z0-9]{1,7})?$")] = ""
    """Name of the unit, such as EUR; it is shown beside amounts."""


class SpillConfig(Section):
    """Places for KV blocks that do not fit into an engine. Everything there is sealed under the tenants' keys, so the
    section `keys` is needed. Blocks of a tenant with `retention: none` are never spilled."""

    memory: Annotated[int, Field(ge=0), BYTES] = 0
    """Host memory for spilled blocks. 0: none."""
    disk: Annotated[int, Field(ge=0), BYTES] = 0
    """Space below `directory` for spilled blocks, used when memory is full. 0: none."""
    directory: Path | None = Field(default=None, strict=False)
    """Folder for spilled blocks; it goes together with `disk`."""

    @model_validator(mode="after")
    def _placed(self) -> Self:
        if not self.memory and not self.disk:
            raise ValueError("memory or disk must be above 0; without either leave spill out")
        if bool(self.disk) != (self.directory is not None):
            raise ValueError("disk and directory go together")
        return self


MAX_WITNESSES = 16
"""Most witnesses: as many signatures as a checkpoint may have beside the log's."""


class WitnessConfig(Section):
    """A witness that cosigns checkpoints of the audit log (docs/audit.md)."""

    key: Annotated[str, Field(pattern=r"^[!-*,-~]{1,64}\+[0-9a-f]{8}\+[A-Za-z0-9+/]{44}$")]
    """Its public key: `name+digits+base64` on one line, of an Ed25519 cosigner."""
    url: str = ""
    """Address below which it takes checkpoints, without `add-checkpoint`."""
    folder: Path | None = Field(default=None, strict=False)
    """In place of an address: folder in which requests are put, and responses found."""

    @model_validator(mode="after")
    def _is_one(self) -> Self:
        if bool(self.url) == (self.folder is not None):
            raise ValueError("a witness has either url or folder")
        if self.url and not self.url.startswith(("https://", "http://")):
            raise ValueError("url begins with https:// or http://")
        return self

    @property
    def name(self) -> str:
        """Name of the witness."""
        return self.key.partition("+")[0]


class AuditConfig(Section):
    """The audit log."""

    directory: Path = Field(strict=False)
    """Folder of the log; it belongs to the supervisor's user alone."""
    key: Path | None = Field(default=None, strict=False)
    """File of the key that signs checkpoints; under systemd a credential. Left out: a key is made in the directory."""
    on_failure: Literal["continue", "refuse"] = "continue"
    """What happens to requests while the disk takes no entries. continue: they are served. refuse: they are refused."""
    names: Literal["pseudonyms", "clear"] = "pseudonyms"
    """How entries name tenants and their credentials. pseudonyms: by keyed pseudonyms, which the commands resolve and
    `athanor tenant shred` unlinks for good. clear: as the policy spells them, for programs that read the files."""
    tiles: Path | None = Field(default=None, strict=False)
    """Folder of the tiles that `athanor audit witness` exports and has cosigned."""
    witnesses: tuple[WitnessConfig, ...] = Field(default=(), max_length=MAX_WITNESSES, strict=False)
    """Witnesses that cosign checkpoints; nothing waits for them."""
    witness_age: Annotated[int, Field(gt=0), Unit("hours")] = 24
    """Age of a witness's last cosignature from which on it is told by `athanor doctor`, a metric and an alert."""

    @model_validator(mode="after")
    def _have_tiles(self) -> Self:
        names = [one.name for one in self.witnesses]
        if names and self.tiles is None:
            raise ValueError("witnesses need tiles: the folder of what they cosign")
        if len(set(names)) < len(names):
            raise ValueError("two witnesses have one name")
        return self


class KeysConfig(Section):
    """Tenants' encryption keys."""

    root_key: Path = Field(strict=False)
    """File of 32 random bytes that only its owner may read (`athanor tenant root` makes one); under systemd a
    credential."""
    keyring: Path = Field(strict=False)
    """Folder of the tenants' keys, wrapped under the root key."""
