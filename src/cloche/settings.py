"""What an operator can set. Each setting is an environment variable, CLOCHE_ and its name."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Annotated, Literal

from pydantic import BeforeValidator, Field, ValidationError
from pydantic_settings import BaseSettings, SettingsConfigDict, SettingsError

from cloche.core.addresses import Network, parse_range
from cloche.core.errors import BadSettings
from cloche.core.network import MAX_PATTERNS, Pattern, PresetName
from cloche.core.quota import Quota


def _default_data() -> Path:
    if os.geteuid() == 0:
        return Path("/var/lib/cloche")
    return Path(os.environ.get("XDG_DATA_HOME", Path.home() / ".local/share")) / "cloche"


class Settings(BaseSettings):
    """Documented in docs/reference/settings.md."""

    model_config = SettingsConfigDict(env_prefix="CLOCHE_", extra="ignore")

    data: Annotated[Path, Field(description="Where images, machines and jobs are kept.")] = Field(
        default_factory=_default_data
    )
    pool_size: Annotated[
        int, Field(ge=0, le=1000, description="Machines kept booted ahead of demand.")
    ] = 2
    database: Annotated[
        str | None,
        Field(
            description="`sqlite:///PATH` or `postgresql://…`; SQLite in the data folder if unset."
        ),
    ] = None
    slots: Annotated[
        int,
        Field(
            ge=0, le=1000, description="Jobs that run at once here; 0: a server without machines."
        ),
    ] = 4
    jobs_per_tenant: Annotated[
        int, Field(ge=1, le=10_000, description="Jobs of one tenant that run at once.")
    ] = 100
    quota: Annotated[
        Quota, Field(description="What a tenant may have that has no quota of its own; JSON.")
    ] = Quota()
    api_key: Annotated[
        str | None, Field(min_length=16, description="A key that opens everything, as an admin's.")
    ] = None
    auth: Annotated[
        Literal["on", "off"],
        Field(description="`off` lets anyone in; accepted on loopback only."),
    ] = "on"
    url: Annotated[
        str, Field(description="The server that `cloche run`, `jobs` and the like talk to.")
    ] = "http://127.0.0.1:8000"
    hosts: Annotated[
        frozenset[str], Field(description="Names the server answers to, besides loopback's; JSON.")
    ] = frozenset()
    log_format: Annotated[
        Literal["text", "json"],
        Field(description="How the server logs: lines for people, or a JSON object a line."),
    ] = "text"
    log_level: Annotated[
        Literal["debug", "info", "warning", "error"],
        BeforeValidator(str.lower),
        Field(description="From which level on the server logs."),
    ] = "info"
    webhook_secret: Annotated[
        str | None,
        Field(description="What webhooks are signed with; one is made and kept if unset."),
    ] = None
    allow_addresses: Annotated[
        tuple[Annotated[Network, BeforeValidator(parse_range)], ...],
        Field(description="Private address ranges that webhooks and machines may call; JSON."),
    ] = ()
    network_presets: Annotated[
        dict[PresetName, Annotated[tuple[Pattern, ...], Field(max_length=MAX_PATTERNS)]],
        Field(description="Lists of hosts that a job's `network` may name; JSON."),
    ] = Field(default_factory=dict)
    ca_bundle: Annotated[
        Path | None,
        Field(description="Certificates that machines with a network trust; the host's if unset."),
    ] = None
    max_wall_s: Annotated[
        float | None, Field(gt=0, description="The most that a job may ask for as `wall_s`.")
    ] = None
    max_silent_s: Annotated[
        float | None, Field(gt=0, description="How long a step may go without writing anything.")
    ] = None
    max_cpu_s: Annotated[
        float | None, Field(gt=0, description="How much processor time a job may use.")
    ] = None
    blobs: Annotated[
        str | None,
        Field(
            description="`s3://…`, `gs://…`, `az://…`, `file:///…`; in the data folder if unset."
        ),
    ] = None
    max_upload_mib: Annotated[
        int, Field(ge=1, le=1 << 20, description="The largest file that is taken in, in MiB.")
    ] = 2048
    keep_jobs_days: Annotated[
        float | None, Field(gt=0, le=36500, description="Days until an ended job is forgotten.")
    ] = None
    keep_uploads_days: Annotated[
        float, Field(gt=0, le=36500, description="Days until an upload is forgotten.")
    ] = 7
    apt_sources: Annotated[
        Path | None,
        Field(description="An apt sources file to build the machine image from."),
    ] = None

    @property
    def database_address(self) -> str:
        return self.database or f"sqlite:///{self.data / 'cloche.db'}"

    @property
    def blob_address(self) -> str:
        return self.blobs or (self.data.absolute() / "blobs").as_uri()

    @property
    def key_file(self) -> Path:
        """Where a server leaves its first key, for the command line to find."""
        return self.data / "api-key"


def load() -> Settings:
    """Read the settings from the environment.

    Raises:
        BadSettings: which variable is wrong, and why.
    """
    try:
        return Settings()
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        name = f"CLOCHE_{first['loc'][0]}".upper()
        where = "".join(f"{part}: " for part in first["loc"][1:])
        raise BadSettings(
            f"{name}: {where}{first['msg']}.",
            remedy=f"Correct {name}, or unset it for its default.",
        ) from None
    except SettingsError as error:
        # It names the field, and what is wrong with it is always the same.
        name = "CLOCHE_" + str(error).partition('"')[2].partition('"')[0].upper()
        raise BadSettings(
            f"{name} is not JSON.", remedy=f"Correct {name}, or unset it for its default."
        ) from None
