"""Sends spans to a collector, when OpenTelemetry's own variables name one."""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections.abc import AsyncIterator, Mapping
from typing import TYPE_CHECKING, Final

from cloche import __version__
from cloche.core import tracing
from cloche.core.errors import BadSettings

if TYPE_CHECKING:
    from opentelemetry.sdk.trace import TracerProvider

_ENDPOINTS: Final = ("OTEL_EXPORTER_OTLP_TRACES_ENDPOINT", "OTEL_EXPORTER_OTLP_ENDPOINT")
_PROTOCOLS: Final = ("OTEL_EXPORTER_OTLP_TRACES_PROTOCOL", "OTEL_EXPORTER_OTLP_PROTOCOL")
_FLUSH_S: Final = 5.0
"""How long a server that stops waits for a collector that does not answer."""


@contextlib.asynccontextmanager
async def exported(environment: Mapping[str, str]) -> AsyncIterator[None]:
    """Send spans for the length of an `async with` block; do nothing when no collector is named.

    Raises:
        BadSettings: one is named, but the parts that send are not installed, or speak otherwise.
    """
    named = next((name for name in _ENDPOINTS if environment.get(name)), None)
    if named is None or environment.get("OTEL_TRACES_EXPORTER") == "none":
        yield
        return
    _check_protocol(environment)
    provider = _provider(named)
    tracing.use(provider.get_tracer("cloche", __version__))
    try:
        yield
    finally:
        tracing.use(None)
        # The SDK waits 30 s, and the thread it waits in cannot be interrupted.
        flushing = threading.Thread(target=provider.shutdown, name="last spans", daemon=True)
        flushing.start()
        await asyncio.to_thread(flushing.join, _FLUSH_S)


def _check_protocol(environment: Mapping[str, str]) -> None:
    for name in _PROTOCOLS:
        spoken = environment.get(name)
        if spoken:
            if spoken != "http/protobuf":
                raise BadSettings(
                    f"{name} is {spoken!r}; Cloche sends traces by http/protobuf alone.",
                    remedy=f"Unset {name} and name the collector's HTTP port, usually 4318.",
                )
            return


def _provider(named: str) -> TracerProvider:
    # Loaded here: a server that traces nothing does without them.
    try:
        from opentelemetry.exporter.otlp.proto.http.trace_exporter import (  # noqa: PLC0415
            OTLPSpanExporter,
        )
        from opentelemetry.sdk.resources import OTELResourceDetector, Resource  # noqa: PLC0415
        from opentelemetry.sdk.trace import TracerProvider  # noqa: PLC0415
        from opentelemetry.sdk.trace.export import BatchSpanProcessor  # noqa: PLC0415
    except ImportError as error:
        raise BadSettings(
            f"{named} is set, but what sends traces is not installed ({error.name}).",
            remedy=f"Install it with `pip install 'cloche[otel]'`, or unset {named}.",
        ) from error
    ours = {"service.name": "cloche", "service.version": __version__}
    given = OTELResourceDetector().detect().attributes
    resource = Resource.create({key: ours[key] for key in ours if key not in given})
    provider = TracerProvider(resource=resource, shutdown_on_exit=False)
    provider.add_span_processor(BatchSpanProcessor(OTLPSpanExporter()))
    return provider
