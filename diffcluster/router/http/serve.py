"""Runs the router: its server thread, and uvicorn on the main thread."""

from __future__ import annotations

import errno
import json
import logging
import os
import signal
import socket
from typing import TYPE_CHECKING

import uvicorn

from diffcluster.errors import AddressInUseError, ConfigError
from diffcluster.router.http.app import make_app
from diffcluster.router.server import DiffusionServer

if TYPE_CHECKING:
    from diffcluster.config import RouterConfig

__all__ = ["run"]

_log = logging.getLogger(__name__)


def run(config: RouterConfig, ready_fd: int | None = None) -> int:
    """Serve until asked to stop; the exit status. One line of JSON on `ready_fd` says where, once it is bound.

    Raises:
        AddressInUseError, ConfigError: it could not start.
    """
    listener = _listen(config.host, config.port)
    fatal: list[str] = []
    uvicorn_server: uvicorn.Server | None = None

    def on_fatal(reason: str) -> None:
        fatal.append(reason)
        if uvicorn_server is not None:
            uvicorn_server.should_exit = True

    server = DiffusionServer(config, on_fatal)
    with listener:
        server.start()
        try:
            app = make_app(server, config)
            settings = uvicorn.Config(
                app, log_config=None, access_log=False, lifespan="on", timeout_graceful_shutdown=5, server_header=False
            )
            uvicorn_server = uvicorn.Server(settings)
            if fatal:  # it failed before there was anything to stop
                uvicorn_server.should_exit = True
            port = listener.getsockname()[1]
            host = f"[{config.host}]" if ":" in config.host else config.host
            _log.info(
                "HTTP on http://%s:%d, roles on tcp://%s:%d", host, port, config.control_host, server.control_port
            )
            if ready_fd is not None:
                _tell(ready_fd, f"http://{host}:{port}", port, config.control_host, server.control_port)
            # uvicorn raises the signal that ended it once more; by default that would skip all that follows here.
            for number in (signal.SIGTERM, signal.SIGINT):
                signal.signal(number, lambda *_: None)
            uvicorn_server.run(sockets=[listener])
        finally:
            server.stop()
    if fatal:
        _log.error("the router has failed: %s", fatal[0])
        return 1
    return 0


def _tell(descriptor: int, url: str, port: int, control_host: str, control_port: int) -> None:
    where = {"url": url, "port": port, "control": f"tcp://{control_host}:{control_port}", "control_port": control_port}
    with os.fdopen(descriptor, "w", encoding="utf-8") as pipe:
        pipe.write(json.dumps(where) + "\n")


def _listen(host: str, port: int) -> socket.socket:
    try:
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        return socket.create_server((host, port), family=family, backlog=2048)
    except OSError as error:
        if error.errno == errno.EADDRINUSE:
            raise AddressInUseError(f"router.port: port {port} of {host} is in use") from error
        raise ConfigError("router.host", f"cannot listen on {host}:{port}: {error.strerror}") from error
