"""What does a prompt cost an engine on a GPU where nothing is trusted? Beside a pool of one domain, on one host.

One server serves whoever connects. The other has certificates for its tenants, memory of their own, and a Unix socket
over which it hands that memory out; the engines' blocks have names under the tenant's key. For each server one engine
computes and stores, and another one loads. Llama-3.1-8B's shape with random weights; the engines share one GPU and take
turns.

Needs CUDA, 110 GiB of its memory, and 60 GiB of the host's.
"""

from __future__ import annotations

import contextlib
import random
from collections.abc import Mapping
from dataclasses import asdict
from typing import Annotated

import typer

from benchmarks.cases.gpu import OPTIONS, empty_own_cache, prompt_of, write_model
from benchmarks.cases.gpu_network import WRITER, load
from benchmarks.cases.tls import files_in
from benchmarks.harness import measuring as harness
from benchmarks.harness.measuring import Logs, Row, at_most, time_ratio
from kvpool.certificates import Authority
from kvpool.name_key import NameKey
from kvpool.principal import ALL_TENANTS, Principal, Role
from testbed.engine import Engine, EngineSpec, kvpool_transfer_config, start_all

POOL_GIB = 12
SIDES = ("one domain", "tenants")
WARM_REACH, COLD_REACH = 1.05, 1.02


def main(
    logs: Logs,
    rounds: Annotated[int, typer.Option(help="Prompts that count.")] = 9,
    tokens: Annotated[int, typer.Option(help="Tokens in a prompt.")] = 20_000,
) -> None:
    """Time prompts that are computed and stored, and that are loaded, with trust and without."""
    model = write_model(logs)
    with contextlib.ExitStack() as stack:
        authority = Authority.create(logs / "pki")
        operator = files_in(authority.issue_principal(Principal(ALL_TENANTS, Role.OPERATOR)))
        tenant = files_in(authority.issue_principal(Principal("acme", Role.ENGINE_WRITE)))
        server = files_in(authority.issue_server([]))
        name_key = logs / "acme.key"
        NameKey.create(name_key)
        unix = logs / "kvpool"
        flags = ["--tls-cert", server.cert, "--tls-key", server.key, "--tls-client-ca", server.ca]
        flags += ["--unix-listen", str(unix), "--tenant-memory"]
        memory = f"{POOL_GIB}GiB"
        plain = stack.enter_context(harness.kvpool_server(memory))
        stack.enter_context(harness.server_process(memory, *flags, tls=operator))
        transfers = {
            "one domain": kvpool_transfer_config(plain, load_timeout_ms=20_000, transport="shm"),
            "tenants": kvpool_transfer_config(
                f"unix:{unix}",
                load_timeout_ms=20_000,
                transport="shm",
                tls=asdict(tenant),
                name_key_file=str(name_key),
            ),
        }
        specs = {"alone": EngineSpec(model, None, OPTIONS)}
        for side, transfer in transfers.items():
            specs[f"{side}, writer"] = EngineSpec(model, transfer, WRITER)
            specs[f"{side}, reader"] = EngineSpec(model, transfer, OPTIONS)
        engines = start_all(stack, specs, logs)
        rows = _prompts(engines, rounds, tokens)
    harness.report("gpu_tenants", rows, rounds=rounds, tokens=tokens)


def _prompts(engines: Mapping[str, Engine], rounds: int, tokens: int) -> list[Row]:
    """Time to the first token."""
    writers = {"alone": "alone"} | {side: f"{side}, writer" for side in SIDES}
    cold: dict[str, list[float]] = {name: [] for name in writers}
    warm: dict[str, list[float]] = {side: [] for side in SIDES}
    for nth in range(rounds + 1):
        prompt = prompt_of(tokens, f"round {nth}")
        picks = random.Random(nth)
        for name in picks.sample(list(cold), len(cold)):  # In any order: the GPU is slower for who comes after a pause.
            cold[name].append(engines[writers[name]].generate([prompt], max_tokens=1)[0].ttft_s)
        for side in SIDES:
            empty_own_cache(engines[writers[side]])  # Succeeds once all is stored.
        for side in picks.sample(SIDES, len(SIDES)):
            warm[side].append(load(engines[f"{side}, reader"], side, prompt))
    for taken in (*cold.values(), *warm.values()):
        del taken[0]
    return [
        *(Row(f"cold TTFT, {name}", harness.ms(taken), "ms") for name, taken in cold.items()),
        *(Row(f"warm TTFT, {side}", harness.ms(taken), "ms") for side, taken in warm.items()),
        at_most("cold, tenants / alone", time_ratio(cold["tenants"], cold["alone"]), "ratio", COLD_REACH),
        at_most("warm, tenants / one domain", time_ratio(warm["tenants"], warm["one domain"]), "ratio", WARM_REACH),
    ]


if __name__ == "__main__":
    typer.run(main)
