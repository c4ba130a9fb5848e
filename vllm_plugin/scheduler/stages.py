"""The namespaces of an engine's pipeline stages, and a session for each: a block is in the pool if every stage has it.

With one stage the scheduler knows the namespace from its own configuration; with several it learns each stage's from
the workers' handshake.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace

from vllm.logger import init_logger

from kvpool.protocol.namespace import NamespaceSpec
from kvpool.security.name_key import named_by
from vllm_plugin.config import ConnectorConfig
from vllm_plugin.metadata import Handshake
from vllm_plugin.metrics import Recorder
from vllm_plugin.model.identity import is_in_doubt, is_named
from vllm_plugin.session import Session

logger = init_logger("vllm.kvpool.stages")


class Stages:
    """Opens, compares and moves the namespaces of an engine's pipeline stages."""

    def __init__(self, num_stages: int, config: ConnectorConfig, recorder: Recorder):
        self.sessions: list[Session] = []  # One per stage; empty until the stages' namespaces are known.
        self.specs: list[NamespaceSpec] = []  # One per stage.
        self.weights_epoch = config.weights_epoch
        self.are_weights_named = True  # The namespaces name the weights by the content of their files.
        self.are_weights_in_doubt = False  # The weights may not be those that the namespaces name.
        self.disagree = False  # Ranks name other namespaces than the scheduler: nothing is loaded or stored any more.
        self._num_stages = num_stages
        self._config = config
        self._recorder = recorder
        self._fingerprints: list[bytes] = []

    @property
    def are_open(self) -> bool:
        """Whether the pool may be called for every stage."""
        return bool(self.sessions) and all(session.namespace is not None for session in self.sessions)

    @property
    def transport(self) -> str:
        """Transports to the stages, each once: this process's choice, which ranks on its host share. "" while away."""
        open_ones = [namespace for session in self.sessions if (namespace := session.namespace) is not None]
        return "+".join(dict.fromkeys(namespace.transport.name for namespace in open_ones))

    @property
    def boot_token(self) -> int:
        """Of the server; differs after each restart. 0 while the pool is away."""
        namespace = self.sessions[0].namespace if self.sessions else None
        return 0 if namespace is None else namespace.boot_token

    def handshake(self, metadata: Mapping[tuple[int, int], object]) -> None:
        """Opens the namespaces that the workers report, by stage and rank, where the scheduler cannot derive them."""
        specs = {ranks: each.spec for ranks, each in metadata.items() if isinstance(each, Handshake)}
        if not specs:
            if metadata and self._num_stages > 1:
                logger.error(
                    "kvpool is off for this engine: the handshake of another connector has replaced that of "
                    "KVPoolConnector; run at most one connector with a handshake under a MultiConnector"
                )
            return
        stages: list[NamespaceSpec] = []
        for stage in range(self._num_stages):
            of_stage = {spec.fingerprint(): spec for (at, _), spec in specs.items() if at == stage}
            if len(of_stage) != 1:
                self._turn_off(
                    f"the ranks of pipeline stage {stage} name {len(of_stage)} different namespaces "
                    f"({', '.join(name.hex()[:12] for name in of_stage)})"
                )
                return
            stages += of_stage.values()
        # Of several kvpools under a MultiConnector, each is told what the first one's workers say.
        own, key = self._config, self._config.name_key()
        named = (named_by(spec, key) for spec in stages)
        self.open([replace(spec, tenant=own.tenant, salt=own.salt, weights_epoch=self.weights_epoch) for spec in named])

    def open(self, specs: Sequence[NamespaceSpec]) -> None:
        """Opens a session for each stage, in the background."""
        self.close()
        names = ["scheduler"] if len(specs) == 1 else [f"scheduler, stage {stage}" for stage in range(len(specs))]
        self.specs = list(specs)
        self.are_weights_named = all(map(is_named, specs))
        self.are_weights_in_doubt = any(map(is_in_doubt, specs))
        self._fingerprints = [spec.fingerprint() for spec in specs]  # As ranks report them, whatever is reset later.
        self.sessions = [
            Session(self._config.client_config(), spec, name, self._recorder, explains=True)
            for spec, name in zip(specs, names, strict=True)
        ]

    def compare(self, namespaces: Iterable[tuple[int, bytes]]) -> None:
        """Compares the fingerprints that ranks report of their stage's namespace with the scheduler's."""
        for stage, fingerprint in namespaces:
            if self._fingerprints and self._fingerprints[stage] != fingerprint:
                self._turn_off(
                    f"a rank of pipeline stage {stage} names namespace {fingerprint.hex()[:12]}, the scheduler "
                    f"{self._fingerprints[stage].hex()[:12]}"
                )

    def move(self, weights_epoch: str) -> None:
        """Moves every stage to the namespace of another weights epoch."""
        self.weights_epoch = weights_epoch
        self.specs = [replace(spec, weights_epoch=weights_epoch) for spec in self.specs]
        for session, spec in zip(self.sessions, self.specs, strict=True):
            session.move(spec)

    def close(self) -> None:
        """Ends the connections; the pool's leases expire by themselves. Idempotent."""
        for session in self.sessions:
            session.close()

    def _turn_off(self, how: str) -> None:
        """Nothing is shared from now on: what one side stores is not what the other looks up."""
        self.disagree = True
        self._recorder.set("namespaces_disagree", 1)
        logger.error(
            "kvpool is off for this engine: %s. Give every rank the same model files, environment and kvpool release, "
            "and two kvpools under a MultiConnector the same num_shards; `kvpool namespaces --diff` shows what differs",
            how,
        )
