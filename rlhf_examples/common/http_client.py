"""The HTTP client of reward servers and judges; servers on this machine are never reached through a proxy."""

import ipaddress
import socket
import ssl
from functools import cache

import httpx2


async def fetch(address: str, body: bytes | None = None, headers: dict[str, str] | None = None) -> httpx2.Response:
    """The response to a POST of a JSON body, or to a GET without one; redirects are followed.

    headers: of the request, in addition to the type of its body.
    Without a timeout: cancelling the call closes its connection. Raises httpx2.HTTPError if there is no response.
    """
    # With an explicit transport httpx2 does not read the environment's proxy settings, which may be invalid.
    direct = httpx2.AsyncHTTPTransport(verify=ssl_context()) if is_this_machine(httpx2.URL(address).host) else None
    async with httpx2.AsyncClient(
        timeout=None, follow_redirects=True, verify=ssl_context(), transport=direct
    ) as client:
        if body is None:
            return await client.get(address, headers=headers)
        return await client.post(address, content=body, headers={"Content-Type": "application/json", **(headers or {})})


def is_this_machine(host: str) -> bool:
    """Whether a host's name or IP address is this machine's by its form: loopback, "any address", its own name."""
    try:
        address = ipaddress.ip_address(host)
    except ValueError:
        return host.lower() in ("localhost", socket.gethostname().lower())
    return address.is_loopback or address.is_unspecified


@cache
def ssl_context() -> ssl.SSLContext:
    """The TLS settings of all requests, made once: reading the certificates takes 20 ms."""
    return httpx2.create_ssl_context()
