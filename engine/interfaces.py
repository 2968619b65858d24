"""Which network interface of this machine reaches the others.

in: the host where ranks meet, the addresses that every rank told  ->  out: the name of an interface, for gloo
Invariant: gloo's own choice, the address of this machine's name, is 127.0.0.1 on many, which no other machine reaches; where this
file finds no answer (not Linux), that choice stands.
"""

from __future__ import annotations

import array
import ipaddress
import socket
import struct
import sys
from collections.abc import Sequence
from pathlib import Path

IFREQ = 40  # bytes of Linux's struct ifreq where a pointer has 8
SIOCGIFCONF = 0x8912


def own_addresses() -> dict[str, str]:
    """address -> interface, without the loopback's and link-local ones; empty where it is not known how to ask."""
    if sys.platform != "linux" or struct.calcsize("P") != 8:
        return {}
    pairs = _ipv4() + _ipv6()
    return {address: name for address, name in pairs if not ipaddress.ip_address(address).is_loopback}


def _ipv4() -> list[tuple[str, str]]:
    import fcntl

    table = array.array("B", bytes(256 * IFREQ))
    start, _ = table.buffer_info()
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as asker:
        filled = fcntl.ioctl(asker, SIOCGIFCONF, struct.pack("iL", len(table), start))
    rows = [table[i : i + IFREQ].tobytes() for i in range(0, struct.unpack("iL", filled)[0], IFREQ)]
    return [(socket.inet_ntoa(row[20:24]), row[:16].split(b"\0")[0].decode().partition(":")[0]) for row in rows]


def _ipv6() -> list[tuple[str, str]]:
    try:
        rows = [line.split() for line in Path("/proc/net/if_inet6").read_text().splitlines()]
    except OSError:
        return []
    return [(str(ipaddress.IPv6Address(int(row[0], 16))), row[5]) for row in rows if row[3] != "20"]  # 20: link-local


def address_towards(host: str) -> str | None:
    """This machine's address on the way to a host; None if there is no way. Nothing is sent."""
    try:
        family, kind, _, _, place = socket.getaddrinfo(host, 9, type=socket.SOCK_DGRAM)[0]
        with socket.socket(family, kind) as asker:
            asker.connect(place)
            return str(asker.getsockname()[0])
    except OSError:
        return None


def tell_addresses(host: str | None) -> list[str]:
    """What a rank tells the others: its machine's addresses, the one towards `host` (where ranks meet) first."""
    mine = list(own_addresses())
    first = address_towards(host) if host else None
    return sorted(mine, key=lambda address: address != first)


def choose_interface(host: str | None, told: Sequence[Sequence[str]]) -> str | None:
    """The interface towards the other machines, from what every rank told; the loopback's where there is no other machine.

    An address that this machine has too (a container bridge's, mostly) leads to no other.
    """
    mine = own_addresses()
    elsewhere = [address for addresses in told for address in addresses if address not in mine]
    if not elsewhere:
        return "lo" if sys.platform == "linux" else None
    for target in [*([host] if host else []), *elsewhere]:
        here = address_towards(target)
        if here in mine:
            return mine[here]
    return None
