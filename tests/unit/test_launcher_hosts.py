"""Lists of hosts and hostfiles as they are read, and how ranks are given to hosts."""

from __future__ import annotations

import pytest

from ncclcomm.errors import ArgumentError
from ncclcomm.launcher.hosts import Host, Place, parse_hostfile, parse_hosts, place


@pytest.mark.parametrize(
    ("text", "hosts"),
    [
        ("h1", [("h1", None)]),
        ("h1,h2:4", [("h1", None), ("h2", 4)]),
        ("node[01-03,7]:2", [("node01", 2), ("node02", 2), ("node03", 2), ("node7", 2)]),
        ("a[1-2]-ib,b.site.org:16", [("a1-ib", None), ("a2-ib", None), ("b.site.org", 16)]),
    ],
)
def test_lists(text: str, hosts: list[tuple[str, int | None]]) -> None:
    assert [(host.name, host.slots) for host in parse_hosts(text)] == hosts


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("", "empty entry"),
        ("h1,,h2", "empty entry"),
        ("h1,", "empty entry"),
        ("a[1-", "brackets don't match"),
        ("a[2-1]", "'2-1'"),
        ("a[x]", "'x'"),
        ("h1:0", "'h1:0' must end in a number of slots"),
        ("h1:", "'h1:' must end in a number of slots"),
        ("h1:2:3", "'h1:2:3' must end in a number of slots"),
        ("h1:\N{SUPERSCRIPT TWO}", "must end in a number of slots"),
        ("h1 h2", "'h1 h2' is no host name"),
        ("-oProxyCommand=x", "is no host name"),
        ("h1,h[1-2]", "host h1 is named twice"),
    ],
)
def test_typing_errors_in_lists(text: str, said: str) -> None:
    with pytest.raises(ArgumentError) as raised:
        parse_hosts(text)
    assert said in str(raised.value)
    assert "--hosts" in str(raised.value)
    assert "\n" not in str(raised.value)


def test_hostfile() -> None:
    text = "# all of them\nh1 slots=4   # the first\n\n  h2:2\nh[3-4]\r\nh5\tslots=1\n"
    hosts = [("h1", 4), ("h2", 2), ("h3", None), ("h4", None), ("h5", 1)]
    assert [(host.name, host.slots) for host in parse_hostfile(text, "hosts.txt")] == hosts


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("", "hosts.txt names no host"),
        ("# none\n\n", "hosts.txt names no host"),
        ("h1\nh2 slots=x\n", "hosts.txt, line 2: 'h2:x' must end in a number of slots"),
        ("h1\nh2 max_slots=2\n", "hosts.txt, line 2: 'h2 max_slots=2' is no host"),
        ("h1\n\nh1 slots=2", "host h1 is named twice"),
        ("a[1-\n", "hosts.txt, line 1"),
    ],
)
def test_typing_errors_in_hostfiles(text: str, said: str) -> None:
    with pytest.raises(ArgumentError) as raised:
        parse_hostfile(text, "hosts.txt")
    assert said in str(raised.value)


@pytest.mark.parametrize(
    ("hosts", "size", "per_node", "places"),
    [
        ("h1:2,h2:2", 4, None, [2, 2]),
        ("h1:2,h2:2", 3, None, [2, 1]),
        ("h1:2,h2:2", 2, None, [2]),
        ("h1:2,h2:2", None, None, [2, 2]),
        ("h1,h2", 5, None, [3, 2]),
        ("h1,h2,h3", 3, None, [1, 1, 1]),
        ("h1,h2", None, None, [1, 1]),
        ("h1:3,h2", None, None, [3, 1]),
        ("h1,h2", None, 4, [4, 4]),
        ("h1,h2", 6, 4, [4, 2]),
        ("h1:8,h2", 4, 2, [2, 2]),
    ],
)
def test_placement(hosts: str, size: int | None, per_node: int | None, places: list[int]) -> None:
    found = place(parse_hosts(hosts), size, per_node)
    assert found == tuple(Place(f"h{number}", ranks) for number, ranks in enumerate(places, 1))


@pytest.mark.parametrize(
    ("hosts", "size", "per_node", "said"),
    [
        ("h1:2,h2:2", 5, None, "-n 5 is more than the 4 slots of h1:2,h2:2: name more hosts, or more slots"),
        ("h1,h2", 9, 4, "-n 9 is more than the 8 slots"),
        ("h1:2,h2", None, 4, "--ranks-per-node 4 is more than the 2 slots of h1"),
        ("h[1-9]:1", 10, None, "h1:1,h2:1,h3:1,h4:1,..."),
    ],
)
def test_more_ranks_than_slots(hosts: str, size: int | None, per_node: int | None, said: str) -> None:
    with pytest.raises(ArgumentError) as raised:
        place(parse_hosts(hosts), size, per_node)
    assert said in str(raised.value)


def test_the_mend_may_be_anothers() -> None:
    with pytest.raises(ArgumentError, match="2 slots of h1:2: ask SLURM"):
        place([Host("h1", 2)], 3, None, "ask SLURM")
