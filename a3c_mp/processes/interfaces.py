"""Which address and network interface of this machine reach another one."""

import array
import errno
import fcntl
import socket
import struct

LOOPBACK = "lo"
SIOCGIFCONF, MOST_ADDRESSES = 0x8912, 1000  # of netdevice(7): the IPv4 addresses of all interfaces


def address_towards(address: str) -> str:
    """IPv4 address of this machine from which it connects to a host. Raises OSError if there is no way to it."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        probe.connect((address, 1))  # sends nothing
        return probe.getsockname()[0]


def interface_towards(address: str) -> str:
    """Name of the network interface of this machine that reaches a host; of loopback for an address of loopback.

    Raises OSError if there is none, or the host has no IPv4 address.
    """
    form = "16s4x4s16x"  # struct ifreq: a name and a struct sockaddr_in
    found = array.array("B", bytes(struct.calcsize(form) * MOST_ADDRESSES))
    own = socket.inet_aton(address_towards(address))
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        request = struct.pack("iP", len(found), found.buffer_info()[0])
        used, _ = struct.unpack("iP", fcntl.ioctl(probe, SIOCGIFCONF, request))
    if own[0] == 127:
        return LOOPBACK
    for name, theirs in struct.iter_unpack(form, found.tobytes()[:used]):
        if theirs == own:
            return name.partition(b"\0")[0].partition(b":")[0].decode()  # "eth0:1" is a second address of eth0
    raise OSError(errno.ENODEV, f"no interface has the address {socket.inet_ntoa(own)}")
