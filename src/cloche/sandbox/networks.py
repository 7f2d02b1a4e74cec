"""Gives machines the network that was asked for them: one for all machines of a host."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator, Iterable, Mapping
from dataclasses import dataclass

from cloche.core.addresses import Rules
from cloche.core.network import PACKAGES, Network, Policy, settle
from cloche.sandbox import outfit, registries
from cloche.sandbox.dialling import Dialler
from cloche.sandbox.egress import Egress, Tell
from cloche.sandbox.sandbox import Sandbox


@dataclass(frozen=True, slots=True)
class Opened:
    """A machine's network while it lasts."""

    egress: Egress
    env: Mapping[str, str]
    """What every command that is to use it is told."""


class Networks:
    """What the operator has set up, and what the host's own tools use."""

    def __init__(
        self,
        dialler: Dialler | None = None,
        *,
        presets: Mapping[str, Iterable[str]] | None = None,
        bundle: bytes = b"",
    ) -> None:
        self._dialler = dialler or Dialler(Rules())
        self._presets = dict(presets or {})
        self._bundle = bundle
        self._registries = registries.Source()

    async def policy(self, network: Network) -> Policy:
        """Spell a policy out.

        Raises:
            BadRequest: there is no such preset.
        """
        presets = dict(self._presets)
        if PACKAGES in network.presets and PACKAGES not in presets:
            presets[PACKAGES] = (await self._registries()).patterns
        return settle(network, presets)

    @contextlib.asynccontextmanager
    async def open(
        self, sandbox: Sandbox, network: Network, *, tell: Tell, spent_bytes: int = 0
    ) -> AsyncIterator[Opened]:
        """Open a machine's network; it is closed when the block ends.

        Raises:
            BadRequest: there is no such preset.
            PortTaken: a program in the machine listens on the proxy's port.
        """
        policy = await self.policy(network)
        egress = Egress(sandbox, policy, self._dialler, tell=tell, spent_bytes=spent_bytes)
        # First of all: what runs on a machine that is taken up waits for it.
        async with egress:
            await outfit.place(sandbox, self._bundle)
            told = (await self._registries()).env
            env = outfit.environment(egress.port, told, certificates=bool(self._bundle))
            yield Opened(egress, env)
