"""Forms as browsers send them to an agent's page, with files."""

from __future__ import annotations

import http.client
from urllib.parse import urlsplit

BOUNDARY = "----a-boundary"


def body(files: dict[str, bytes], fields: dict[str, str], field: str = "suspect") -> bytes:
    """A form as browsers send it."""
    parts = [
        f'Content-Disposition: form-data; name="{field}"; filename="{name}"\r\n'
        "Content-Type: application/octet-stream\r\n\r\n".encode()
        + content
        for name, content in files.items()
    ]
    parts += [f'Content-Disposition: form-data; name="{n}"\r\n\r\n{text}'.encode() for n, text in fields.items()]
    start = f"--{BOUNDARY}\r\n".encode()
    return b"".join(start + part + b"\r\n" for part in parts) + f"--{BOUNDARY}--\r\n".encode()


def send(address: str, content: bytes, **headers: str) -> tuple[int, str]:
    parts = urlsplit(address)
    sent = {"content-type": f"multipart/form-data; boundary={BOUNDARY}", "content-length": str(len(content))}
    sent |= {name.replace("_", "-"): value for name, value in headers.items()}
    connection = http.client.HTTPConnection("127.0.0.1", parts.port, timeout=60)
    connection.putrequest("POST", parts.path + "ask", skip_host="host" in sent)
    for name, value in sent.items():
        connection.putheader(name, value)
    try:
        connection.endheaders()
        connection.send(content)
    except OSError:
        pass  # it was refused before all was sent
    answer = connection.getresponse()
    text = answer.read().decode("utf-8", "replace")
    connection.close()
    return answer.status, text
