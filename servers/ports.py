"""Ports on the loopback interface."""

from __future__ import annotations

import random
import socket

from servers import ServerError

CANDIDATES = range(20_000, 32_000)
"""Ports below the range that the system uses for outgoing connections, so no connection blocks them."""

_given: set[int] = set()


def is_free(address: str, port: int) -> bool:
    """
    Tell whether a server could listen on a port now.

    :param address: an address of this machine.
    :param port: the port.
    """
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((address, port))
        except OSError:
            return False
    return True


def free_port(address: str = "127.0.0.1") -> int:
    """
    Return a port on which nothing listens; each port is returned once in a process. It is not reserved: use it soon.

    :param address: an address of this machine.
    :raises ServerError: a thousand random candidates were all taken.
    """
    for port in random.sample(CANDIDATES, min(1000, len(CANDIDATES))):
        # A port that was given a moment ago is still free: a server could get the same port twice.
        if port not in _given and is_free(address, port):
            _given.add(port)
            return port
    raise ServerError(f"No free port found on {address} between {CANDIDATES.start} and {CANDIDATES.stop}.")


def require_free(address: str, ports: dict[str, int]) -> None:
    """
    Refuse to start a server whose ports are taken.

    :param address: an address of this machine.
    :param ports: purpose → port.
    :raises ServerError: a port is taken; the message names it.
    """
    for purpose, port in ports.items():
        if not is_free(address, port):
            raise ServerError(
                f"The {purpose} port {address}:{port} is taken. "
                "Stop the program that listens there, or choose another port."
            )
