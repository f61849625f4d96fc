"""Several hosts on this machine: network namespaces on one switch, each with its own host name and hosts file."""

import contextlib
import os
import shutil
import subprocess

import pytest


def run(*words):
    return subprocess.run(words, check=True, capture_output=True, text=True)


class Switch:
    """The hosts `names`, at 10.78.0.1 and up; a cable is the link from a host to the switch."""

    def __init__(self, names, folder):
        self.names, self.folder = names, folder
        self.spaces = {name: f"shardkit-{name}-{os.getpid()}" for name in [*names, "switch"]}

    def cable(self, name, state):
        """Plugs in the cable of a host ("up"), or pulls it ("down")."""
        run("ip", "-n", self.spaces["switch"], "link", "set", f"to-{name}", state)

    def command(self, name, words):
        """The command that runs another one on a host."""
        script = f'mount --bind {self.folder}/hosts /etc/hosts && hostname {name} && exec "$@"'
        return [
            *("ip", "netns", "exec", self.spaces[name], "unshare", "--uts", "--mount", "sh", "-c", script, "sh"),
            *map(str, words),
        ]


@contextlib.contextmanager
def switched(names, folder):
    """A switch with these hosts; skips the test where the system does not allow namespaces."""
    if os.geteuid() != 0 or not shutil.which("ip") or not shutil.which("unshare"):
        pytest.skip("network namespaces need root and the commands ip and unshare")
    made = Switch(names, folder)
    middle = made.spaces["switch"]
    with contextlib.ExitStack() as stack:
        try:
            for space in made.spaces.values():
                run("ip", "netns", "add", space)
                stack.callback(subprocess.run, ["ip", "netns", "delete", space], check=False)
                run("ip", "-n", space, "link", "set", "lo", "up")
            run("ip", "-n", middle, "link", "add", "bridge", "type", "bridge")
            run("ip", "-n", middle, "link", "set", "bridge", "up")
            for index, name in enumerate(names):
                space, link = made.spaces[name], f"to-{name}"
                run("ip", "-n", middle, "link", "add", link, "type", "veth", "peer", "name", "eth0", "netns", space)
                run("ip", "-n", middle, "link", "set", link, "master", "bridge", "up")
                run("ip", "-n", space, "addr", "add", f"10.78.0.{index + 1}/24", "dev", "eth0")
                run("ip", "-n", space, "link", "set", "eth0", "up")
            run("unshare", "--uts", "--mount", "true")
        except subprocess.CalledProcessError as error:
            pytest.skip(f"this system does not allow network namespaces: {error.stderr.strip()}")
        hosts = ["127.0.0.1 localhost", *(f"10.78.0.{index + 1} {name}" for index, name in enumerate(names))]
        (folder / "hosts").write_text("\n".join(hosts) + "\n")
        yield made
