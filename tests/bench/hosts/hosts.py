"""Hosts of a cluster as network namespaces of this machine, for what needs several machines: each has one link to all others, with a rate and
a delay. A host can lose its link, and be killed. Needs root, iproute2 and /dev/net/tun.

    with Hosts(4, milliseconds=1, gbit=1) as hosts:
        hosts.start(0, ["ping", "-c", "1", hosts.address(3)]).wait()

tc limits what leaves a host. The kernel's own delay, tc's netem, is a module that many kernels lack: so the links end in a process here, which
holds each packet back for a while, and hands a host no more than its link carries."""
import contextlib
import ctypes
import fcntl
import heapq
import json
import os
import select
import signal
import struct
import subprocess
import time

LINK = "uplink"
MTU = 9000
PACKETS_AT_ONCE = 32
TUNSETIFF, IFF_TUN, IFF_NO_PI, CLONE_NEWNET = 0x400454CA, 0x0001, 0x1000, 0x40000000


def run(*command):
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout


@contextlib.contextmanager
def inside(path):
    """This thread is in that namespace."""
    c = ctypes.CDLL(None, use_errno=True)
    with open("/proc/thread-self/ns/net") as home, open(path) as namespace:
        if c.setns(namespace.fileno(), CLONE_NEWNET):
            raise OSError(ctypes.get_errno(), path)
        try:
            yield
        finally:
            c.setns(home.fileno(), CLONE_NEWNET)


def make_link():
    link = os.open("/dev/net/tun", os.O_RDWR | os.O_NONBLOCK)
    fcntl.ioctl(link, TUNSETIFF, struct.pack("16sH22x", LINK.encode(), IFF_TUN | IFF_NO_PI))
    return link


def relay(links, seconds, bytes_per_second):
    """Hands the packets of the links on, for ever; `links`: {address: file}."""
    free_at = dict.fromkeys(links.values(), 0.0)  # the time at which a link can carry more
    waiting, number = [], 0
    while True:
        pause = max(0.0, waiting[0][0] - time.monotonic()) if waiting else None
        for link in select.select(list(links.values()), [], [], pause)[0]:
            for _ in range(PACKETS_AT_ONCE):
                try:
                    packet = os.read(link, 65536)
                except BlockingIOError:
                    break
                except OSError:  # the link is down
                    break
                to = links.get(packet[16:20]) if packet[0] >> 4 == 4 else None
                if to is not None:
                    due = free_at[to] = max(time.monotonic() + seconds, free_at[to] + len(packet) / bytes_per_second)
                    number += 1
                    heapq.heappush(waiting, (due, number, to, packet))
        while waiting and waiting[0][0] <= time.monotonic():
            _, _, to, packet = heapq.heappop(waiting)
            try:
                os.write(to, packet)
            except OSError:  # the link is down, or full: the packet is lost
                pass


class Hosts:
    def __init__(self, count, milliseconds, gbit):
        self.names = [f"ferry{os.getpid()}-{host}" for host in range(count)]
        self.seconds, self.gbit, self.relay = milliseconds / 1000, gbit, None

    def address(self, host):
        return f"10.77.0.{host + 1}"

    def __enter__(self):
        links = {}
        for host, name in enumerate(self.names):
            run("ip", "netns", "add", name)
            with inside(f"/run/netns/{name}"):
                links[bytes([10, 77, 0, host + 1])] = make_link()
            for command in (["link", "set", "lo", "up"], ["address", "add", self.address(host) + "/24", "dev", LINK],
                            ["link", "set", LINK, "mtu", str(MTU), "txqueuelen", "10000", "up"]):
                run("ip", "-n", name, *command)
            run("tc", "-n", name, "qdisc", "add", "dev", LINK, "root", "tbf", "rate", f"{self.gbit}gbit", "burst", "256kb", "latency", "50ms")
        self.relay = os.fork()
        if self.relay == 0:
            try:
                os.nice(-10)
                relay(links, self.seconds, self.gbit * 1e9 / 8)
            finally:
                os._exit(1)
        for link in links.values():
            os.close(link)
        return self

    def __exit__(self, *error):
        for host, name in enumerate(self.names):
            self.kill(host)
            run("ip", "netns", "delete", name)
        os.kill(self.relay, signal.SIGKILL)
        os.waitpid(self.relay, 0)

    def start(self, host, command, **popen):
        return subprocess.Popen(["ip", "netns", "exec", self.names[host], *map(str, command)], **popen)

    def cut(self, host):
        """Nothing comes from the host any more, nor to it, and nobody is told."""
        run("ip", "-n", self.names[host], "link", "set", LINK, "down")

    def mend(self, host):
        run("ip", "-n", self.names[host], "link", "set", LINK, "up")

    def kill(self, host):
        """All that runs there."""
        for process in run("ip", "netns", "pids", self.names[host]).split():
            try:
                os.kill(int(process), signal.SIGKILL)
            except ProcessLookupError:
                pass

    def sent(self, host):
        """Bytes that have left the host."""
        return json.loads(run("ip", "-n", self.names[host], "-s", "-j", "link", "show", LINK))[0]["stats64"]["tx"]["bytes"]
