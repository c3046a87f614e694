"""Two hosts on one machine: namespaces of their own (network, mounts, processes, name, shared memory), and a cable.

The trainer's is made around a process that runs a scenario; it makes the other one. All of it goes with that process.
Needs root, or a kernel that gives user namespaces to everybody.
"""

from __future__ import annotations

import importlib
import json
import os
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

OURS, THEIRS = "10.77.0.1", "10.77.0.2"
_APART = ["--net", "--mount", "--uts", "--ipc", "--pid", "--fork", "--kill-child", "--mount-proc"]
_ALONE = "mount -t tmpfs tmpfs /dev/shm && hostname {name} && ip link set lo up && exec {command}"


def run_on_two(scenario: Callable[[Other, Path], None], folder: Path, seconds: float) -> None:
    """Run a scenario in a process on the first of two hosts; it fails where that does.

    Args:
        scenario: a function of a module.
        folder: for its files.
        seconds: that it may take.
    """
    root = [] if os.getuid() == 0 else ["--map-root-user"]
    possible = subprocess.run(["unshare", *root, *_APART, "ip", "link", "set", "lo", "up"], capture_output=True)
    if possible.returncode:
        pytest.fail(
            "two hosts are made of namespaces here, which needs util-linux, iproute2, and root with CAP_SYS_ADMIN (in "
            f"a container: --privileged) or user namespaces for everybody: {possible.stderr.decode()}"
        )
    command = [sys.executable, __file__, scenario.__module__, scenario.__name__, str(folder)]
    alone = ["sh", "-c", _ALONE.format(name="trainer-host", command='"$@"'), "sh"]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path), "GLOO_SOCKET_IFNAME": "lo"}
    with (folder / "scenario.log").open("w") as log:
        running = subprocess.Popen(
            ["unshare", *root, *_APART, *alone, *command], env=environment, stdout=log, stderr=log
        )
        try:
            code = running.wait(seconds)
        except subprocess.TimeoutExpired:
            code = None
        finally:
            running.kill()
            running.wait()
    if code != 0:
        pytest.fail(f"{'a hang' if code is None else f'exit {code}'}: {(folder / 'scenario.log').read_text()[-8000:]}")


def pushed(sync: Any, merge: str, *, verify: bool) -> None:
    """A push over the cable, which carries what the report says, and little more."""
    before = sent()
    report = sync.push(verify=verify)
    went = sent() - before
    assert report.transports == ("tcp",), report
    who = "trainer" if merge == "trainer" else "engine"
    assert (report.merge, report.base_sent) == (who, False), report.merge_why
    # Headers of packets (52 of at least 1448 bytes each), calls over HTTP, acknowledgements.
    assert report.nbytes < went < 1.1 * report.nbytes + 100_000, (merge, verify, went, report.nbytes)


def are_elsewhere(sync: Any, count: int) -> None:
    """The only engine of a push has so many workers, and none of them is on this host."""
    from lora_merge.engine.control.calls import drive
    from lora_merge.engine.transport.liveness import host_id

    workers = drive(sync._trainer.controls[0].rpc("hello"))
    assert len(workers) == count
    assert not {worker["host"] for worker in workers} & {host_id()}


class Other:
    """The other host, or one of several.

    Args:
        number: of it, from 0; each has a cable of its own.

    Attributes:
        address: its own, on that cable.
        command: what runs a command there; without any capability, as a container's processes do.
    """

    def __init__(self, number: int = 0) -> None:
        name = f"engine-host-{number}" if number else "engine-host"
        self._cable = f"cable{number}" if number else "cable"
        ours, self.address = f"10.77.{number}.1", f"10.77.{number}.2"
        self._ours = ours
        alone = ["sh", "-c", _ALONE.format(name=name, command="sleep infinity")]
        self._init = subprocess.Popen(["unshare", *_APART, *alone])
        children = Path(f"/proc/{self._init.pid}/task/{self._init.pid}/children")
        _until(lambda: bool(children.read_text()))
        self._pid = children.read_text().split()[0]
        _until(lambda: self._inside("hostname", check=False) == name)
        _until(lambda: "UP" in self._inside("ip", "link", "show", "lo", check=False))
        _run("ip", "link", "add", self._cable, "type", "veth", "peer", "name", "cable", "netns", self._pid)
        _run("ip", "address", "add", f"{ours}/24", "dev", self._cable)
        _run("ip", "link", "set", self._cable, "up")
        if not number:
            _run("ip", "route", "add", "default", "via", self.address)
        self._inside("ip", "address", "add", f"{self.address}/24", "dev", "cable")
        self.plug()
        self.command = [*self._enter(), "setpriv", "--bounding-set=-all", "--inh-caps=-all"]

    def cut(self) -> None:
        """Nothing comes through any more; neither side is told."""
        self._inside("ip", "link", "set", "cable", "down")

    def plug(self) -> None:
        """The cable is there, again."""
        self._inside("ip", "link", "set", "cable", "up")
        self._inside("ip", "route", "replace", "default", "via", self._ours)
        _until(lambda: _answers(self.address))

    def slow(self, rate: str) -> None:
        """What goes there takes its time from now on.

        Args:
            rate: as `tc` writes it: "1mbit".
        """
        shape = ["tbf", "rate", rate, "burst", "16kb", "latency", "2s"]
        _run("tc", "qdisc", "replace", "dev", self._cable, "root", *shape)

    def _enter(self) -> list[str]:
        return ["nsenter", "--target", self._pid, "--net", "--mount", "--uts", "--ipc", "--pid"]

    def _inside(self, *command: str, check: bool = True) -> str:
        return _run(*self._enter(), *command, check=check)


def sent() -> int:
    """Bytes that have gone to the other host."""
    return int(json.loads(_run("ip", "-json", "-stats", "link", "show", "cable"))[0]["stats64"]["tx"]["bytes"])


def _answers(address: str) -> bool:
    try:
        socket.create_connection((address, 9), 1).close()
    except ConnectionRefusedError:  # by the other kernel
        return True
    except OSError:
        return False
    return True


def _run(*command: str, check: bool = True) -> str:
    done = subprocess.run(command, capture_output=True, text=True)
    assert not check or not done.returncode, f"{command}: {done.stderr}"
    return done.stdout.strip()


def _until(ready: Callable[[], bool]) -> None:
    end = time.monotonic() + 60
    while not ready():
        assert time.monotonic() < end, "the other host does not come up"
        time.sleep(0.05)


if __name__ == "__main__":
    import faulthandler

    faulthandler.dump_traceback_later(540, exit=True)
    module, name, folder = sys.argv[1:]
    import hosts

    getattr(importlib.import_module(module), name)(hosts.Other(), Path(folder))
    sys.stdout.flush()
    os._exit(0)  # what is left goes with this process
