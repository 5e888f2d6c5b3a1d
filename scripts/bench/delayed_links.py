"""Links with a rate and a round trip between network namespaces, in user space: for kernels without `netem`.

Each namespace has a TUN device, and one process passes packets from one to another: a packet occupies its
sender's link for as long as the rate says, and arrives half a round trip later. Packets are large (60 kB), so
that one process keeps up with gigabits a second. Linux, root.
"""

from __future__ import annotations

import contextlib
import fcntl
import heapq
import multiprocessing
import os
import select
import struct
import subprocess
import time
from collections.abc import Iterator, Sequence

_TUNSETIFF, _IFF_TUN, _IFF_NO_PI = 0x400454CA, 0x0001, 0x1000
_MTU = 60_000
# TCP's window must hold what is under way in a round trip: 6 MB at 1 Gb/s and 50 ms.
_BUFFERS = "4096 4194304 134217728"


def _command(*words: str) -> None:
    subprocess.run(words, check=True, capture_output=True, text=True)


def relay(devices: Sequence[int], bits_per_second: float, round_trip: float) -> None:
    """Pass packets on until killed; device i is that of 10.77.0.<1 + i>."""
    free = [0.0] * len(devices)
    waiting: list[tuple[float, int, int, bytes]] = []
    order = 0
    while True:
        left = waiting[0][0] - time.monotonic() if waiting else 1.0
        ready, _, _ = select.select(devices, [], [], max(0.0, left))
        now = time.monotonic()
        for device in ready:
            packet = os.read(device, 65_536)
            if packet[0] >> 4 != 4 or packet[16:19] != b"\x0a\x4d\x00":
                continue  # not for one of us: neighbour discovery and the like
            target = packet[19] - 1
            if not 0 <= target < len(devices):
                continue
            source = devices.index(device)
            free[source] = max(free[source], now) + 8 * len(packet) / bits_per_second
            heapq.heappush(waiting, (free[source] + round_trip / 2, order, target, packet))
            order += 1
        while waiting and waiting[0][0] <= time.monotonic():
            _, _, target, packet = heapq.heappop(waiting)
            os.write(devices[target], packet)


@contextlib.contextmanager
def delayed_namespaces(names: Sequence[str], bits_per_second: float, round_trip: float) -> Iterator[None]:
    """Network namespaces with device `eth0` and address 10.77.0.<1 + index>; removed at the end.

    round_trip: seconds. Raises subprocess.CalledProcessError or OSError without root.
    """
    devices: list[int] = []
    made: list[str] = []
    process = None
    try:
        for index, name in enumerate(names):
            device = os.open("/dev/net/tun", os.O_RDWR)
            devices.append(device)
            outer = f"tfd{index}"
            fcntl.ioctl(device, _TUNSETIFF, struct.pack("16sH", outer.encode(), _IFF_TUN | _IFF_NO_PI))
            _command("ip", "netns", "add", name)
            made.append(name)
            _command("ip", "link", "set", outer, "netns", name)
            for words in (
                ("ip", "link", "set", "lo", "up"),
                ("ip", "link", "set", outer, "name", "eth0"),
                ("ip", "link", "set", "eth0", "mtu", str(_MTU), "txqueuelen", "10000", "up"),
                ("ip", "addr", "add", f"10.77.0.{1 + index}/24", "dev", "eth0"),
                ("sysctl", "-qw", f"net.ipv4.tcp_rmem={_BUFFERS}", f"net.ipv4.tcp_wmem={_BUFFERS}"),
            ):
                _command("ip", "netns", "exec", name, *words)
        process = multiprocessing.get_context("fork").Process(
            target=relay, args=(devices, bits_per_second, round_trip), daemon=True
        )
        process.start()
        yield
    finally:
        if process is not None:
            process.kill()
            process.join()
        for device in devices:
            os.close(device)
        for name in made:
            subprocess.run(["ip", "netns", "del", name], check=False)
