"""interfaces.py: which interface leads to the other machines. tests/test_machines.py tries it between two."""

from __future__ import annotations

import socket
import sys

import pytest

from engine import interfaces
from engine.interfaces import address_towards, choose_interface, own_addresses, tell_addresses

WAYS = {"10.0.0.2": "10.0.0.1", "one": "10.0.0.1", "192.168.5.9": "192.168.5.1", "named-here": "127.0.1.1"}


@pytest.fixture
def machine(monkeypatch):
    """A machine with two networks and a container bridge, and the ways of WAYS."""
    monkeypatch.setattr(interfaces, "own_addresses", lambda: {"172.17.0.1": "docker0", "192.168.5.1": "eth0", "10.0.0.1": "ib0"})
    monkeypatch.setattr(interfaces, "address_towards", WAYS.get)


@pytest.mark.skipif(sys.platform != "linux", reason="asks Linux")
def test_this_machine_s_addresses():
    names = {name for _, name in socket.if_nameindex()}
    mine = own_addresses()
    assert set(mine.values()) <= names - {"lo"}
    assert not any(address.startswith("127.") or address == "::1" for address in mine)
    towards = address_towards("127.0.0.1")
    assert towards == "127.0.0.1" and towards not in mine
    for address in mine:
        assert address_towards(address) == address


def test_a_host_that_is_not_there_has_no_way():
    assert address_towards("no.such.host.invalid") is None


def test_the_address_towards_the_meeting_is_told_first(machine):
    assert tell_addresses("10.0.0.2") == ["10.0.0.1", "172.17.0.1", "192.168.5.1"]
    assert tell_addresses("named-here") == tell_addresses(None) == ["172.17.0.1", "192.168.5.1", "10.0.0.1"]


def test_the_interface_towards_the_meeting_wins(machine):
    told = [["10.0.0.2", "192.168.5.9", "172.17.0.1"], ["10.0.0.1", "172.17.0.1", "192.168.5.1"]]
    assert choose_interface("10.0.0.2", told) == "ib0"
    assert choose_interface("192.168.5.9", told) == "eth0"


def test_where_the_meeting_is_here_or_in_a_file_the_others_addresses_decide(machine):
    told = [["172.17.0.1", "192.168.5.1", "10.0.0.1"], ["172.17.0.1", "10.0.0.2", "192.168.5.9"]]
    assert choose_interface("named-here", told) == choose_interface(None, told) == "ib0"


@pytest.mark.skipif(sys.platform != "linux", reason="the loopback has other names elsewhere")
def test_one_machine_stays_at_home(machine):
    told = [["172.17.0.1", "192.168.5.1", "10.0.0.1"]] * 2
    assert choose_interface(None, told) == choose_interface("named-here", told) == "lo"


def test_no_way_leaves_the_choice_to_gloo(machine):
    assert choose_interface(None, [["172.17.0.1"], ["203.0.113.7"]]) is None
