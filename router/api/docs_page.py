"""The page at /docs: Swagger UI over the description at /openapi.json. All of it comes from this host, and it reaches no other.

Owns the page. Its script and style are files of the package fastapi-offline.
"""

from base64 import b64encode
from hashlib import sha256
from importlib.resources import files

from fastapi.openapi.docs import get_swagger_ui_html
from starlette.requests import Request
from starlette.responses import FileResponse, HTMLResponse, Response
from starlette.routing import Route

from router.api.guard import DOCS_PREFIX

SCRIPT, STYLE = "swagger-ui-bundle.js", "swagger-ui.css"


def docs_routes() -> list[Route]:
    """The page, and the files that it loads."""
    page = get_swagger_ui_html(
        openapi_url="./openapi.json",
        title="Tandem",
        swagger_js_url=f".{DOCS_PREFIX}/{SCRIPT}",
        swagger_css_url=f".{DOCS_PREFIX}/{STYLE}",
        swagger_favicon_url="data:,",
        swagger_ui_parameters={"validatorUrl": None},
    )
    html = bytes(page.body)
    headers = {"content-security-policy": _policy(html)}

    async def docs(request: Request) -> Response:
        return HTMLResponse(html, headers=headers)

    async def docs_file(request: Request) -> Response:
        return FileResponse(str(files("fastapi_offline") / "static" / request.url.path.rpartition("/")[2]))

    return [Route(DOCS_PREFIX, docs), *(Route(f"{DOCS_PREFIX}/{name}", docs_file) for name in (SCRIPT, STYLE))]


def _policy(html: bytes) -> str:
    """Only what is from here, and no page around it: a page could lead a click to one of its buttons."""
    starter = html.split(b"<script>")[1].split(b"</script>")[0]
    digest = b64encode(sha256(starter).digest()).decode()
    return (
        f"default-src 'none'; script-src 'self' 'sha256-{digest}'; style-src 'self' 'unsafe-inline'; img-src 'self' data:; "
        "connect-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
    )
