"""The server's process: its options, its signals, and what it says to people and managers."""

from __future__ import annotations

import asyncio
import inspect
import json
import os
import signal
import sys
from collections.abc import Callable
from typing import TYPE_CHECKING, Annotated, Any, get_origin

import structlog
import typer
from rich.markup import escape

from kvpool.client.config import is_loopback, split_address
from kvpool.protocol.errors import ConfigError
from kvpool.protocol.text import size_text
from kvpool.transport.unix_socket import SCHEME, socket_path
from kvpool.version import __version__
from kvpool_server.keeping import keeper, store
from kvpool_server.process import logs
from kvpool_server.process.addresses import is_local, name_for_clients
from kvpool_server.process.logs import LogEvents
from kvpool_server.process.runtime import EventLoop, keep_collections_short, keep_freed_memory
from kvpool_server.settings.config import ServerConfig, describe
from kvpool_server.settings.loading import load, service_links

if TYPE_CHECKING:
    from kvpool_server.app.server import Server

log = structlog.get_logger()

KEEPER_LOOK_S = 0.5


def _version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"kvpool-server {__version__}")
        raise typer.Exit


def _flag(name: str) -> inspect.Parameter:
    """The option of a setting. Its text is checked with those of the environment and the file."""
    kind = ServerConfig.model_fields[name].annotation
    given: Any = bool if kind is bool else list[str] if get_origin(kind) is tuple else str
    flags = [f"--{name.replace('_', '-')}"] if given is bool else []  # Without one that negates it.
    meaning, default = describe(name)
    told = escape(f"{meaning} (default: {default or 'none'})")  # Rich would take pyjwt[crypto] for markup.
    annotation = Annotated[given | None, typer.Option(*flags, help=told)]
    return inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=None, annotation=annotation)


def serve(
    *, version: Annotated[bool, typer.Option("--version", callback=_version, is_eager=True)] = False, **given: Any
) -> None:
    """Serve a pool of KV-cache blocks to the vLLM engines that point at it.

    Each setting comes from its flag, else from KVPOOL_<NAME> in the environment, else from the TOML file, else from its
    default. Unknown keys are errors. SIGTERM and SIGINT finish calls under way, then stop; SIGUSR2 drains as `kvpool
    drain` does, then stops; SIGUSR1 to its keeper restarts the server with its blocks (see --keep).

    Example: kvpool-server --listen 127.0.0.1:50051 --memory 64GiB
    """
    settings = load({name: value for name, value in given.items() if value is not None})
    if settings.keep == "no" and store.keeper_pid() is not None:
        notify("KEEP=no")
    events = LogEvents()
    logs.configure(settings.log_format, settings.log_level, events)
    if links := service_links(os.environ):
        log.info("ignored environment variables that Kubernetes sets for its Services", names=sorted(links))
    keep_freed_memory()
    with asyncio.Runner(loop_factory=EventLoop) as runner:
        runner.run(_run(settings, events))


_OWN = inspect.signature(serve, eval_str=True).parameters
serve.__signature__ = inspect.Signature(  # type: ignore[attr-defined]  # Typer makes the options from it.
    [*map(_flag, ServerConfig.model_fields), _OWN["version"]]
)


async def _run(settings: ServerConfig, events: LogEvents) -> None:
    from kvpool_server.app.server import Server  # Neither --help nor a wrong setting waits for gRPC and the pool.

    keep_collections_short()
    server = Server(settings, events)
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, server.request_stop)
    loop.add_signal_handler(signal.SIGUSR2, server.request_drain)
    loop.add_signal_handler(signal.SIGUSR1, log.warning, "SIGUSR1 restarts a server if its keeper gets it (see --keep)")
    loop.add_signal_handler(signal.SIGHUP, server.parts.look_at_credentials)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, keeper.HANDLED)
    if (keeper_pid := store.keeper_pid()) is not None:
        server.in_background(end_with(keeper_pid, server.request_stop))
    stopping = asyncio.create_task(server.wait())
    starting = asyncio.create_task(server.start())
    await asyncio.wait((starting, stopping), return_when=asyncio.FIRST_COMPLETED)
    if not starting.done():  # A start may wait minutes for a predecessor to release memory or a tier.
        starting.cancel()
        await asyncio.wait((starting,))
        log.info("stopped before the start had ended")
        return
    await starting
    host = name_for_clients(split_address(settings.listen)[0], server.parts.certificate_names)
    if settings.uses_mooncake:
        log.warning(
            "Mooncake listens on all addresses and does not authenticate callers: any host that reaches its ports can "
            "read and write blocks of all tenants; close them to all hosts but your engines and servers",
            used_by=settings.uses_mooncake,
        )
    if server.parts.data is not None and is_local(settings.data_listen) and not is_local(settings.listen):
        log.warning(
            "clients on other hosts will move bytes through gRPC, which is slower, because only this host can reach "
            "--data-listen; give it an address that they can reach"
        )
    endpoint = f"[{host}]:{server.parts.port}" if ":" in host else f"{host}:{server.parts.port}"
    unix_endpoint = SCHEME + os.path.abspath(settings.unix_listen) if settings.unix_listen else ""
    transfer_config = _kv_transfer_config(settings, endpoint if settings.tls_cert else unix_endpoint or endpoint)
    if settings.log_format == "json":
        log.info(
            "ready",
            endpoint=endpoint,
            unix_endpoint=unix_endpoint or None,
            metrics_and_health=_http_url(server),
            kv_transfer_config=transfer_config,
        )
    else:
        output: Any = logs.Lossy(sys.stdout)
        typer.echo(_welcome(" and ".join(filter(None, (endpoint, unix_endpoint))), server, transfer_config), output)
    notify("READY=1", f"STATUS=serving {endpoint}")
    try:
        await stopping
    finally:
        notify("STOPPING=1", "STATUS=draining")
        await server.stop()


_OF_CERTIFICATE = ", with DIR the directory of the engine's certificate (`kvpool certs`: tenants/TENANT/engine-write)"
_OF_TOKEN = ", with DIR a directory with the authority's ca.crt and the engine's token, and TENANT the token's tenant"


def _http_url(server: Server) -> str:
    if not server.parts.http_port:
        return "off"
    scheme, host = "https" if server.config.tls_cert else "http", split_address(server.config.http_listen)[0]
    return f"{scheme}://{host}:{server.parts.http_port}"


def _kv_transfer_config(settings: ServerConfig, endpoint: str) -> dict[str, Any]:
    """The value of vLLM's --kv-transfer-config for engines of this server; DIR and TENANT are to be filled in."""
    extra: dict[str, Any] = {"endpoint": endpoint}
    if settings.tls_client_ca:
        extra["tls"] = {"ca": "DIR/ca.crt", "cert": "DIR/tls.crt", "key": "DIR/tls.key"}
    elif settings.tls_cert:
        extra |= {"tls": {"ca": "DIR/ca.crt"}, "token_file": "DIR/token", "tenant": "TENANT"}
    elif not socket_path(endpoint) and not is_loopback(split_address(endpoint)[0]):
        extra["insecure_network"] = True
    return {
        "kv_connector": "KVPoolConnector",
        "kv_role": "kv_both",
        "kv_load_failure_policy": "recompute",
        "kv_connector_extra_config": extra,
    }


def _welcome(endpoints: str, server: Server, transfer_config: dict[str, Any]) -> str:
    size = size_text(server.parts.pool.arena.arena_bytes)
    config = server.config
    places = _OF_CERTIFICATE if config.tls_client_ca else _OF_TOKEN if config.tls_cert else ""
    return f"""kvpool-server {__version__}: {size} on {endpoints}; metrics and health: {_http_url(server)}
Point vLLM at it{places}:
  vllm serve MODEL --prefix-caching-hash-algo sha256_cbor --kv-transfer-config \\
    '{json.dumps(transfer_config, separators=(",", ":"))}'
"""


async def end_with(keeper_pid: int, stop: Callable[[], None]) -> None:
    """Stops the server when its keeper has ended: a successor would find its ports taken."""
    while os.getppid() == keeper_pid:
        await asyncio.sleep(KEEPER_LOOK_S)
    log.error("the keeper of the memory was killed; the server stops")
    stop()


def notify(*states: str) -> None:
    """Sends states such as READY=1 to the manager that started this process. A failure is only logged."""
    try:
        store.notify(*states)
    except OSError as error:
        log.warning("the service manager could not be told", states=states, error=str(error))


def main() -> None:
    """Entry point of the console script."""
    app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)
    paragraphs = inspect.cleandoc(serve.__doc__ or "").split("\n\n")
    app.command(help="\n\n".join(" ".join(each.split()) for each in paragraphs))(serve)
    if is_json := logs.wants_json(sys.argv[1:], os.environ):
        logs.log_as_json()
    try:
        app()
    except ConfigError as error:
        if is_json:
            log.critical(f"kvpool-server: {error}")
        else:
            typer.echo(f"kvpool-server: {error}", err=True)
        raise SystemExit(2) from None
