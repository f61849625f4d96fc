"""What a fault says: the processes, what is wrong with them, their phases and steps."""

from __future__ import annotations

from collections.abc import Sequence

from shardkit.jobs.monitor.members import Health, Members
from shardkit.runtime.channel.place import name_processes

_HOSTS = 4  # in a sentence
_BATCHES = 4  # groups of processes with equal batches, in a sentence
_KILLED = "without reporting an error (SIGKILL or out of memory?)"


def name_members(ranks: Sequence[int], members: Members) -> str:
    """The processes, and in a job on several hosts the first of theirs: `processes 1, 3 on node1, node2`."""
    names = name_processes(ranks)
    all_hosts = {member.host for member in members.values()} - {""}
    hosts: dict[str, None] = {}  # in the order of the ranks
    for rank in ranks:
        host = members[rank].host
        if host:
            hosts[host] = None
    if not hosts or len(all_hosts) == 1:
        return names
    return f"{names} on {', '.join(list(hosts)[:_HOSTS])}"


def describe_phase(phase: str, step: int) -> str:
    """Where a process is, as part of a sentence."""
    match phase:
        case "start":
            return "in startup, before its first step"
        case "data":
            return f"waiting for the data of step {step}"
        case "compile":
            return f"compiling step {step}"
        case "compare":
            return f"comparing the program of step {step} with the others"
        case "step":
            return f"in step {step}"
        case "user code":
            return f"in user code after step {step}"
        case "after":
            return f"in user code after the last step, step {step}"
        case "evaluate":
            return f"evaluating after step {step}"
        case "save":
            return f"saving after step {step}"
        case "commit":
            return f"in the save after step {step} (own part written)"
        case "finish":
            return f"finishing the save after step {step}"
        case "end":
            return f"exiting after step {step}"
    return f"in {phase} of step {step}"


def describe_place(rank: int, members: Members) -> str:
    """Where the host of this process is; in user code its devices may be elsewhere, and tell more."""
    member = members[rank]
    if member.status.phase == "user code":
        return describe_phase(*member.find_phase())
    return describe_phase(member.status.phase, member.status.step)


def describe_end(health: Health, ranks: Sequence[int], members: Members) -> str:
    """How these processes ended; the first of them is named."""
    if health in (Health.DIED, Health.CRASHED):
        return _describe_death(health, ranks, members)
    first = min(ranks, key=lambda rank: members[rank].find_position())
    # An error comes up where the host is, however far behind the devices are.
    status = members[first].status
    where = describe_phase(status.phase, status.step)
    return f"{name_members([first], members)} failed {where}: {members[first].cause}"


def _describe_death(health: Health, ranks: Sequence[int], members: Members) -> str:
    first = ranks[0]  # process 0 if it died: with its coordinator jax ends every other process
    member = members[first]
    where = describe_phase(member.status.phase, member.status.step)
    if member.unseen:
        where = f", last seen {where}"
    else:
        where = f" {where}"
    if health is Health.CRASHED and len(ranks) == len(members) > 1:
        return (
            f"all processes died of a fatal signal ({member.crash}){where}: jax ends them where process 0 fails, which "
            "serves it, or a program from outside of the job joins at that port, which knows no token; read their "
            "output"
        )
    how = _KILLED
    if member.crash:
        how = f"of a fatal signal ({member.crash})"
    text = f"{name_members([first], members)} died {how}{where}"
    if first == 0 and member.crash == "Aborted" and len(members) > 1:
        text += "; jax ends it so, too, where a program from outside of the job joins at its port: see mtls_cert_file"
    return text


def describe_waiting(ranks: Sequence[int], members: Members) -> str:
    """Which processes wait, as the last part of a sentence; empty if none does."""
    if not ranks:
        return ""
    verb = "waits" if len(ranks) == 1 else "wait"
    phase, step = members[ranks[0]].find_phase()
    where = describe_phase(phase, step)
    return f"; {name_processes(ranks)} {verb} {where}"


def describe_silence(ranks: Sequence[int], members: Members, now: float) -> str:
    """The sentence for processes whose machines send no messages."""
    have = "has" if len(ranks) == 1 else "have"
    seconds = members[ranks[0]].find_silence(now)
    where = describe_place(ranks[0], members)
    return (
        f"{name_members(ranks, members)} {have} not answered for {seconds:.1f} s (machine or network down?), last seen "
        f"{where}"
    )


def describe_holding_up(ranks: Sequence[int], members: Members, now: float) -> str:
    """The sentence for processes that the others wait for, in a phase that has no deadline."""
    member = members[ranks[0]]
    doing = "exited"
    if not member.left:
        seconds = member.status.since + member.find_silence(now)
        doing = f"been {describe_place(ranks[0], members)} for {seconds:.1f} s"
    names = name_members(ranks, members)
    if len(ranks) == 1:
        return f"{names} holds up the others: it has {doing}"
    return f"{names} hold up the others: they have {doing}"


def describe_batches(loop: int, step: int, members: Members) -> str:
    """The sentence about a loop's step that was called with different batches: those of the fewest processes first."""
    groups: dict[str, list[int]] = {}
    for rank, member in members.items():
        for run in member.status.batches:
            if run.loop == loop and run.first <= step <= run.last:
                groups.setdefault(run.batch, []).append(rank)

    def smallest_first(group: tuple[str, list[int]]) -> tuple[int, int]:
        _, ranks = group
        return len(ranks), -ranks[0]  # in a tie process 0's last

    smallest = sorted(groups.items(), key=smallest_first)
    names = []
    for batch, ranks in smallest[:_BATCHES]:
        names.append(f"{batch} ({name_members(ranks, members)})")
    text = ", ".join(names)
    if len(smallest) > _BATCHES:
        text += f" and {len(smallest) - _BATCHES} more"
    return (
        f"stopped in step {step}: all processes must call it with the same global shapes and dtypes of the batch; they "
        f"called it with {text}. Pad or drop a short batch, on all processes alike"
    )
