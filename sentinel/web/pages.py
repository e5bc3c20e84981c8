"""The pages for people: the status page and the runbooks, plain files without a foreign byte."""

from __future__ import annotations

from importlib import resources
from typing import Final

from fastapi import FastAPI, HTTPException, Response

_HEADERS: Final = {
    "content-security-policy": "default-src 'none'; script-src 'self'; style-src 'self'; "
    "connect-src 'self'; img-src data:; base-uri 'none'; form-action 'none'; "
    "frame-ancestors 'none'",
    "x-content-type-options": "nosniff",
    "referrer-policy": "no-referrer",
    "cache-control": "no-cache",
}
_TYPES: Final = {
    "status.html": "text/html; charset=utf-8",
    "runbooks.html": "text/html; charset=utf-8",
    "sentinel.css": "text/css; charset=utf-8",
    "status.js": "text/javascript; charset=utf-8",
}


def page_routes(app: FastAPI) -> None:
    """Adds `/`, `/runbooks` and what they load. Raises OSError when the package lacks them."""
    folder = resources.files("sentinel.web") / "static"
    files = {name: (folder / name).read_bytes() for name in _TYPES}

    def page(name: str) -> Response:
        return Response(files[name], media_type=_TYPES[name], headers=_HEADERS)

    @app.get("/", include_in_schema=False)
    def status() -> Response:
        return page("status.html")

    @app.get("/runbooks", include_in_schema=False)
    def runbooks() -> Response:
        return page("runbooks.html")

    @app.get("/static/{name}", include_in_schema=False)
    def static(name: str) -> Response:
        if name not in files:
            raise HTTPException(404, f"no file {name}")
        return page(name)
