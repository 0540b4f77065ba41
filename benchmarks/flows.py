"""What several connections to a peer bring where each is capped: `python -m benchmarks.flows [--flows 1,2,4]`.

Clouds cap what one TCP connection carries, far below what the card does. Here two hosts (network namespaces) have a
queue that gives every connection 40 Mbit/s and no more, told apart by their ports; ranks on them measure their link as
`coremill train` does, with one connection to the peer and with several. Needs root; asserts nothing.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import tempfile
from pathlib import Path

from tests.hosts.namespaces import DEVICE, FakeHost, Fleet, fake_hosts, why_not

from benchmarks import peers

CAP_BITS_PER_SECOND = 40_000_000
QUEUES = 64  # connections whose ports agree in the lowest six bits share one


def main(argv: list[str] | None = None) -> int:
    """Print the measured rate for each number of connections."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.flows", description=(__doc__ or "").split("\n\n")[0])
    parser.add_argument("--flows", default="1,2,4", help="numbers of connections to try (default 1,2,4)")
    flows = [int(word) for word in parser.parse_args(argv).flows.split(",")]
    reason = why_not()
    if reason is not None:
        raise SystemExit(f"no hosts can be made here: {reason}")
    print(f"two hosts, {CAP_BITS_PER_SECOND / 1e6:.0f} Mbit/s for each connection\n")
    print("| connections to the peer | Mbit/s |\n|---:|---:|")
    with tempfile.TemporaryDirectory(prefix="coremill-hosts-") as folder:
        with fake_hosts(2, Path(folder)) as fleet:
            for host in fleet.hosts:
                _cap_each_connection(host)
            for count in flows:
                print(f"| {count} | {_measure(fleet, count) / 1e6:.0f} |", flush=True)
    return 0


def _cap_each_connection(host: FakeHost) -> None:
    """A class per queue; the source port says which: gloo listens, and dials, on another port for each connection."""
    batch = [
        f"qdisc add dev {DEVICE} root handle 1: htb default fff",
        f"class add dev {DEVICE} parent 1: classid 1:fff htb rate 10gbit",
    ]
    for queue in range(QUEUES):
        name = f"1:{queue + 1:x}"
        batch.append(f"class add dev {DEVICE} parent 1: classid {name} htb rate {CAP_BITS_PER_SECOND}bit quantum 1514")
        batch.append(
            f"filter add dev {DEVICE} parent 1: protocol ip u32 match ip sport {queue} {QUEUES - 1:#x} flowid {name}"
        )
    done = subprocess.run(
        ["tc", "-n", host.namespace, "-batch", "-"], input="\n".join(batch), capture_output=True, text=True
    )
    if done.returncode != 0:
        raise SystemExit(f"this kernel has no htb or u32: {done.stderr.strip()}")


def _measure(fleet: Fleet, count: int) -> float:
    words = [sys.executable, "-m", "coremill", "launch", "-q", "--ssh", fleet.ssh, "--hostfile", str(fleet.hostfile())]
    done = subprocess.run(
        fleet.hosts[0].command([*words, "--ppn", "1", "-m", "benchmarks.contenders.link"], peers.ROOT),
        env=peers.environment(peers.FOLDER, {"GLOO_SOCKET_IFNAME": ",".join([DEVICE] * count)}),
        capture_output=True,
        text=True,
        timeout=300,
    )
    rates = [float(line.split()[1]) for line in done.stdout.splitlines() if line.startswith("LINK ")]
    if done.returncode != 0 or not rates:
        raise SystemExit(f"the ranks ended with {done.returncode}: {done.stderr}")
    return rates[0]


if __name__ == "__main__":
    sys.exit(main())
