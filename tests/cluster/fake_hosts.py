"""Hosts of a test's own: network namespaces of this machine, made by hosts.sh."""

from __future__ import annotations

import os
import shutil
import subprocess
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

from flavours import clean_env, missing, run_tree

__all__ = ["Hosts"]

HERE = Path(__file__).parent
SCRIPT_S = 60.0
"""Longest time for one call of hosts.sh, which takes tenths of a second on an idle machine."""


def _why_not() -> str | None:
    """What keeps this machine from having fake hosts; None if nothing obvious does."""
    if os.geteuid() != 0:
        return "network namespaces need root"
    for program, package in (("ip", "iproute2"), ("nsenter", "util-linux"), ("unshare", "util-linux")):
        if shutil.which(program) is None:
            return f"no {program} on PATH: apt-get install {package}"
    return None


class Hosts:
    """A set of fake hosts, h1 to hN, that see each other and nothing else; files are shared.

    Several sets can be up at once. They end at `close`, or when this process ends, however it ends.

    Args:
        count: number of hosts.
        rate: limit of what each host sends, as tc writes it, such as "1gbit"; "" for none.
    """

    def __init__(self, count: int, rate: str = "") -> None:
        reason = _why_not()
        if reason:
            missing("fake hosts", reason)
        self.folder = Path(tempfile.mkdtemp(prefix="ncclcomm-hosts-"))
        self.names = tuple(f"h{number}" for number in range(1, count + 1))
        self.agent = HERE / "nsrsh"
        """Stand-in for ssh, for launchers that run with `env`."""
        self.env = {"FH": str(self.folder), "FH_OWNER": str(os.getpid())}
        """Variables that hosts.sh and the agent need."""
        self._namespaces: list[int] = []
        """Open files of the network namespaces: meanwhile no new namespace gets the number of one of them."""
        try:
            self._script("up", str(count), rate)
        except subprocess.CalledProcessError as error:
            self.close()
            missing("fake hosts", f"no network namespaces here (in a container: CAP_SYS_ADMIN): {error.stderr.strip()}")
        for file in self.folder.glob("*.pid"):
            self._namespaces.append(os.open(f"/proc/{file.read_text().strip()}/ns/net", os.O_RDONLY))

    def _script(self, *args: str, script: str = "hosts.sh") -> str:
        """Call a script beside this file; what it prints."""
        done = subprocess.run(
            [HERE / script, *args],
            env={**os.environ, **self.env},
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=SCRIPT_S,
            check=True,
        )
        return done.stdout

    def start_sshd(self) -> str:
        """Start a real sshd in every host; the ssh command, in words, that reaches them from inside any of them."""
        for program, package in (("ssh", "openssh-client"), ("sshd", "openssh-server")):
            if shutil.which(program) is None:
                missing("sshd", f"no {program} on PATH: apt-get install {package}")
        self._script(script="sshd.sh")
        return f"ssh -F {self.folder}/ssh_config"

    def address(self, number: int) -> str:
        """The address of names[number]."""
        return f"10.77.0.{number + 1}"

    def command(self, host: str, argv: Sequence[str | Path]) -> list[str | Path]:
        """The command that runs argv in a host; it needs `env` of this object."""
        return [HERE / "hosts.sh", "exec", host, *argv]

    def exec(
        self,
        host: str,
        argv: Sequence[str | Path],
        *,
        env: Mapping[str, str] | None = None,
        cwd: str | Path | None = None,
        timeout_s: float = 60.0,
    ) -> subprocess.CompletedProcess[str]:
        """Run a program in a host to its end, under a deadline; see flavours.run_tree.

        Args:
            host: one of `names`.
            argv: program and arguments.
            env: the whole environment; None takes this process's, less what a launcher put there.
            cwd: where it runs.
            timeout_s: seconds until it and all its descendants are killed, in whichever host they are.
        """
        whole = {**(clean_env() if env is None else env), **self.env}
        return run_tree(self.command(host, argv), env=whole, cwd=cwd, timeout_s=timeout_s)

    def pids(self, host: str) -> list[int]:
        """Processes that run in a host now."""
        return [int(pid) for pid in self._script("pids", host).split()]

    def transferred(self) -> dict[str, tuple[int, int]]:
        """Bytes that each host's link has received and sent."""
        rows = (line.split() for line in self._script("bytes").splitlines())
        return {host: (int(received), int(sent)) for host, _, received, _, sent in rows}

    def shape(self, rate: str) -> None:
        """Limit what each host sends; "off" ends it."""
        self._script("shape", rate)

    def cut(self, host: str) -> None:
        """Unplug a host: it runs on, and neither it nor the others hear of each other."""
        self._script("cut", host)

    def crash(self, host: str) -> None:
        """End a host and everything in it at once; it stays away."""
        self._script("crash", host)

    def close(self) -> None:
        """End every host; raises AssertionError if anything of them is left."""
        if not self.folder.exists():
            return
        self._script("down")
        end = time.monotonic() + 5
        while (left := self._left()) and time.monotonic() < end:
            time.sleep(0.02)  # what was killed may take a moment to die
        while self._namespaces:
            os.close(self._namespaces.pop())
        assert not left, f"processes of fake hosts outlive them: {left}"
        assert not self.folder.exists(), f"{self.folder} is left behind"

    def _left(self) -> list[str]:
        """Processes in this set's network namespaces."""
        ours = {os.fstat(namespace).st_ino for namespace in self._namespaces}
        left = []
        for entry in Path("/proc").iterdir():
            try:
                if entry.name.isdecimal() and (entry / "ns" / "net").stat().st_ino in ours:
                    left.append(f"{entry.name} {(entry / 'cmdline').read_bytes()!r}")
            except OSError:
                continue  # it ended meanwhile
        return left
