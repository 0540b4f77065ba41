"""What the servers beside a run have in common: the live page and the metrics. Each only reads, and is only read from.

So many visitors at a time, each for so long: who is slow or asks too much is let go, and nothing of it reaches the run.
"""

from __future__ import annotations

import errno
import os
import socket
import sys
import threading
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

LOOPBACK = "127.0.0.1"
ANY_INTERFACE = ("0.0.0.0", "::")
HOSTS = ("127.0.0.1", "localhost", "[::1]")
MOST_VISITORS = 32
SLOW_SECONDS = 10.0  # to take what was sent, or to ask
HEADERS = {
    "Cache-Control": "no-store",
    "X-Content-Type-Options": "nosniff",
    "X-Frame-Options": "DENY",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Referrer-Policy": "no-referrer",
}
WHY_NO_PORT = {
    errno.EADDRINUSE: "another program listens there",
    errno.EACCES: "ports below 1024 are the system's",
    errno.EADDRNOTAVAIL: "no interface of this machine has that address",
}


def bound(host: str, port: int) -> socket.socket:
    """A listening socket at the address of an interface; `::` is every interface, of IPv4 too. Raises OSError."""
    if host == "::" and not socket.has_dualstack_ipv6():
        host = "0.0.0.0"  # a kernel without IPv6
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    try:
        # A port just left is taken again; not one that is listened on.
        return socket.create_server((host, port), family=family, backlog=16, dualstack_ipv6=host == "::")
    except socket.gaierror:
        raise
    except OSError as error:
        raise OSError(error.errno, os.strerror(error.errno or 0)) from error  # without the words Python adds


class BoundedServer(ThreadingHTTPServer):
    """Serves at a socket that somebody else has bound, a thread for each visitor."""

    daemon_threads = True
    block_on_close = False

    def __init__(self, listener: socket.socket, handler: type[BaseHTTPRequestHandler]) -> None:
        super().__init__(listener.getsockname()[:2], handler, bind_and_activate=False)
        self.socket.close()
        self.socket = listener
        self._visitors = threading.BoundedSemaphore(MOST_VISITORS)

    def process_request(self, request: Any, client_address: Any) -> None:
        """In a thread of its own; one visitor too many is sent away."""
        if not self._visitors.acquire(blocking=False):
            self.shutdown_request(request)
            return
        super().process_request(request, client_address)

    def process_request_thread(self, request: Any, client_address: Any) -> None:
        """Whatever becomes of a visitor, the next one finds a place."""
        try:
            super().process_request_thread(request, client_address)
        finally:
            self._visitors.release()

    def handle_error(self, request: Any, client_address: Any) -> None:
        """A visitor that went away is none; anything else goes to the log, and the server goes on."""
        if not isinstance(sys.exception(), ConnectionError | TimeoutError):
            super().handle_error(request, client_address)


class ReadOnlyHandler(BaseHTTPRequestHandler):
    """Answers GET, one request a connection; what it gives is the subclass's."""

    timeout = SLOW_SECONDS
    server_version, sys_version = "coremill", ""

    def names_this_machine(self) -> bool:
        """Whether the Host header does: a site whose name was made to point here (DNS rebinding) names itself."""
        host = self.headers.get("Host") or ""
        return host in HOSTS or host.rpartition(":")[0] in HOSTS

    def _only_get(self) -> None:
        self.refuse(HTTPStatus.METHOD_NOT_ALLOWED, "this page can only be read")

    do_HEAD = do_POST = do_PUT = do_PATCH = do_DELETE = do_OPTIONS = do_TRACE = do_CONNECT = _only_get

    def begin(self, status: HTTPStatus, content_type: str, length: int | None = None) -> None:
        """Status and headers."""
        self.close_connection = True
        self.send_response(status)
        self.send_header("Content-Type", content_type)
        self.send_header("Connection", "close")
        if length is not None:
            self.send_header("Content-Length", str(length))
        for name, value in HEADERS.items():
            self.send_header(name, value)
        self.end_headers()

    def refuse(self, status: HTTPStatus, why: str) -> None:
        """One line of text."""
        text = f"{why}\n".encode()
        self.begin(status, "text/plain; charset=utf-8", len(text))
        if self.command != "HEAD":
            self.wfile.write(text)

    def log_message(self, format: str, *args: Any) -> None:
        """Requests are not worth a line."""
