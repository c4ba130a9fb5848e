"""A real nginx on loopback, before a server, with the configuration that `deploy/nginx` ships."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

from kvpool.security.tls import TlsFiles
from testbed.ports import free_endpoint
from tests.support.processes import wait_for

SHIPPED = Path(__file__).parents[2] / "deploy" / "nginx" / "kvpool.conf"
STOP_S = 10.0
_MAIN = """daemon off; pid {directory}/pid; error_log {log} warn; worker_processes 2; worker_rlimit_nofile 32768;
events {{ worker_connections 16384; }}
http {{
  {paths}
  include {directory}/kvpool.conf;
}}
"""
_PATHS = ("client_body", "proxy", "fastcgi", "uwsgi", "scgi")


class Nginx:
    """Close it.

    Args:
        server: HOST:PORT of the server's gRPC.
        files: the server's certificate and key, and who issued it.

    Attributes:
        endpoint: HOST:PORT where callers reach the server.
    """

    def __init__(self, directory: Path, server: str, files: TlsFiles):
        directory = directory / "nginx"
        directory.mkdir()
        self.endpoint, self._log = free_endpoint(), directory / "error.log"
        conf = SHIPPED.read_text()
        for shipped, here in {
            "server 127.0.0.1:50051;": f"server {server};",
            "listen 50050 ": f"listen {self.endpoint} ",
            "/etc/kvpool/pki/server/tls.crt": files.cert,
            "/etc/kvpool/pki/server/tls.key": files.key,
            "/etc/kvpool/pki/server/ca.crt": files.ca,
        }.items():
            assert shipped in conf
            conf = conf.replace(shipped, here)
        (directory / "kvpool.conf").write_text(conf)
        paths = " ".join(f"{name}_temp_path {directory}/{name};" for name in _PATHS)
        main = directory / "nginx.conf"
        main.write_text(_MAIN.format(directory=directory, log=self._log, paths=paths))
        program = shutil.which("nginx", path=f"{Path(sys.executable).parent}:/usr/sbin")
        assert program is not None, "requirements/setup.sh puts nginx beside Python"
        self._process = subprocess.Popen([program, "-c", main, "-p", directory, "-e", self._log])
        wait_for(self._is_up, "nginx's start")

    def close(self) -> None:
        """Ends its processes: those of a killed one would go on."""
        self._process.terminate()
        self._process.wait(STOP_S)

    def _is_up(self) -> bool:
        assert self._process.poll() is None, self._log.read_text()
        return (self._log.parent / "pid").exists()
