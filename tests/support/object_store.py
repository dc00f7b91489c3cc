"""A server of S3 in this process, of the package moto, whose requests are recorded; ranks reach it by HTTP."""

from __future__ import annotations

import os
import threading
import urllib.request
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any

BUCKET = "bucket"


@dataclass(frozen=True)
class Request:
    """A request: its method, path and query, and the bytes that were sent and returned."""

    method: str
    path: str
    query: str
    num_sent: int
    num_returned: int


@dataclass
class ObjectStore:
    """The server; `requests` are those so far."""

    requests: list[Request] = field(default_factory=list)

    def __post_init__(self) -> None:
        from moto.moto_server.werkzeug_app import DomainDispatcherApplication, create_backend_app
        from werkzeug.serving import WSGIRequestHandler, make_server

        class Quiet(WSGIRequestHandler):
            def log_request(self, *_: Any) -> None:
                """Write nothing to stderr."""

        application = DomainDispatcherApplication(create_backend_app)
        self._server = make_server("127.0.0.1", 0, self._recorded(application), threaded=True, request_handler=Quiet)
        self._thread = threading.Thread(target=self._server.serve_forever, daemon=True)
        self._thread.start()

    @property
    def endpoint(self) -> str:
        return f"http://127.0.0.1:{self._server.port}"

    def _recorded(self, application: Callable[..., Iterable[bytes]]) -> Callable[..., Iterable[bytes]]:
        def call(environ: dict[str, Any], start_response: Any) -> Iterable[bytes]:
            body = [bytes(part) for part in application(environ, start_response)]
            sent = int(environ.get("CONTENT_LENGTH") or 0)
            path, query = environ["PATH_INFO"], environ.get("QUERY_STRING", "")
            returned = sum(map(len, body)) if environ["REQUEST_METHOD"] == "GET" else 0
            self.requests.append(Request(environ["REQUEST_METHOD"], path, query, sent, returned))
            return body

        return call

    def close(self) -> None:
        """End the server, and remove all objects, which moto keeps for the next server of this process."""
        reset = urllib.request.Request(f"{self.endpoint}/moto-api/reset", method="POST")
        urllib.request.urlopen(reset).close()
        self._server.shutdown()
        self._thread.join()
        self._server.server_close()


def use(endpoint: str) -> Any:
    """Let this process use the store at s3:// URLs; return fsspec's file system."""
    os.environ.update(
        AWS_ENDPOINT_URL_S3=endpoint,
        AWS_ACCESS_KEY_ID="test",
        AWS_SECRET_ACCESS_KEY="test",
        AWS_DEFAULT_REGION="us-east-1",
        AWS_EC2_METADATA_DISABLED="true",
    )
    import s3fs

    s3fs.S3FileSystem.clear_instance_cache()
    return s3fs.S3FileSystem(use_listings_cache=False)
