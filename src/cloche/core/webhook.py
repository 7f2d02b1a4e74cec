"""Whom a job tells of its life, as its request says."""

from __future__ import annotations

import re
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, ValidationError, model_validator
from pydantic_core import Url

MAX_URL = 2048
MAX_HOST = 253
"""As long as a name in the DNS can be."""
_SHAPE = re.compile(r"(?i)https?://[^/\\\s\x00-\x20\x7f][^\s\x00-\x20\x7f]*")

Event = Literal["started", "finished"]


def parse_url(text: str) -> Url:
    """Read the address of a receiver, as browsers do: an odd spelling of an IP becomes plain.

    Raises:
        ValueError: what is wrong with it.
    """
    if not _SHAPE.fullmatch(text):
        raise ValueError("is not an http:// or https:// address")
    try:
        url = Url(text)
    except ValidationError as error:
        raise ValueError(error.errors(include_url=False)[0]["msg"]) from None
    if url.username or url.password:
        raise ValueError("holds a user name or password")
    if not url.host or len(url.host) > MAX_HOST or url.port == 0:
        raise ValueError("leads to no host and port")
    return url


def _web_address(text: str) -> str:
    plain = str(parse_url(text))
    if len(plain) > MAX_URL:
        raise ValueError(f"is longer than {MAX_URL} characters")
    return plain


class Webhook(BaseModel):
    """Where to send word, and of what. A bare URL will do."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    url: Annotated[str, Field(max_length=MAX_URL), AfterValidator(_web_address)]
    events: Annotated[frozenset[Event], Field(min_length=1)] = frozenset({"finished"})

    @model_validator(mode="before")
    @classmethod
    def _take_a_bare_url(cls, value: Any) -> Any:
        return {"url": value} if isinstance(value, str) else value


def also_a_text(schema: dict[str, Any]) -> None:
    """Tell in a field's JSON schema that a bare URL is taken as well."""
    schema["anyOf"].append({"type": "string", "format": "uri", "maxLength": MAX_URL})
