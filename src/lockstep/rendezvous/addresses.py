"""Find this machine's addresses, and which of them other machines know."""

from __future__ import annotations

import fcntl
import socket
import struct
from collections.abc import Iterator

from lockstep.machine import is_loopback

_SIOCGIFADDR = 0x8915


def is_only_here(host: str, port: int) -> bool:
    """Return whether a name that others may know leads back to this machine: Debian and Ubuntu write a machine's own
    name into /etc/hosts with the address 127.0.1.1, at which no other machine reaches it."""
    if is_loopback(host):
        return False
    return all(is_loopback(str(found[4][0])) for found in socket.getaddrinfo(host, port, type=socket.SOCK_STREAM))


def own_address(endpoint: tuple[str, int] | None) -> str:
    """Return this machine's address on the route to the endpoint. Nothing is sent: the kernel only looks it up."""
    host, port = endpoint or ("192.0.2.1", 9)  # an address for documentation (RFC 5737): it takes the default route
    family, kind, protocol, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_DGRAM)[0]
    with socket.socket(family, kind, protocol) as probe:
        try:
            probe.connect(address)
        except OSError as error:
            found = [address for _, address in devices() if not address.startswith("127.")]
            if endpoint is None and len(found) == 1:
                return found[0]
            raise OSError(
                f"this machine's address is not known, because there is no route to {host} ({error.strerror}): give "
                "--local-addr"
            ) from error
        return str(probe.getsockname()[0])


def interface_of(address: str) -> str | None:
    """Return the network device that has an address (IPv4; None for others: then gloo chooses)."""
    return next((name for name, own in devices() if own == address), None)


def devices() -> Iterator[tuple[str, str]]:
    """Yield this machine's network devices with their IPv4 addresses."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        for _, name in socket.if_nameindex():
            try:
                request = fcntl.ioctl(probe, _SIOCGIFADDR, struct.pack("16s24x", name.encode()))
            except OSError:  # a device without an address
                continue
            yield name, socket.inet_ntoa(request[20:24])
