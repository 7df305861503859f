"""Judges what one rank found of its host: a small function for each check, from facts to findings."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

from lockstep.checkup.finding import Finding
from lockstep.checkup.variables import of_variables
from lockstep.common.text import size
from lockstep.device.interfaces import is_loopback

_GIB: Final = 1 << 30


@dataclass(frozen=True)
class Around:
    """What a check must know besides the facts of its rank: the ranks in all, those on its host, and the hosts."""

    size: int
    here: int
    hosts: int


Facts = Mapping[str, Any]
Check = Callable[[Facts, Around], Iterator[Finding]]


def judge(checks: Sequence[tuple[str, Check]], facts: Facts, around: Around) -> list[Finding]:
    """Return the findings of OF_RANK, or of OF_HOST."""
    return [finding for section, check in checks if section in facts for finding in check(facts, around)]


def timeouts(facts: Facts, _: Around) -> Iterator[Finding]:
    """Name what did not answer in time; the other checks leave it out."""
    for name, seconds in facts["timed_out"].items():
        text, remedy = f"no answer within {seconds:g} s", _HANGS.get(name, "look into the system's log")
        yield Finding(name, "problem", text, "a run hangs at the same place", remedy)


def versions(facts: Facts, _: Around) -> Iterator[Finding]:
    """List the versions of what is installed."""
    found = facts["versions"]
    names = ("python", "torch", "lockstep", "lockstep's source")
    extras = [f"{name} {version}" for name, version in found.items() if version and name not in names]
    first = ", ".join(f"{name} {found[name]}" for name in names)
    yield Finding("versions", "ok", f"{first}; {', '.join(extras)}")


def cards(facts: Facts, _: Around) -> Iterator[Finding]:
    """List the devices; a driver without one is a fault."""
    found = facts["cards"]
    if problem := found.get("problem"):
        yield Finding("devices", "problem", problem, "lockstep train refuses to start", "lockstep doctor gpu says more")
    elif found["devices"]:
        yield Finding("devices", "ok", f"CUDA: {_counts(found['devices'])}; lockstep doctor gpu looks closer")
    elif found["driver"]:
        leads_to = "a run computes on the CPU"
        yield Finding("devices", "warning", "a GPU's driver, but torch finds no GPU", leads_to, "lockstep doctor gpu")
    else:
        yield Finding("devices", "ok", "the CPU: there is no driver of a GPU")


def cores(facts: Facts, around: Around) -> Iterator[Finding]:
    """Hold the cores that may be used against the ranks of the host."""
    found = facts["cores"]
    usable, quota = found["usable"], found["quota"]
    limits = [f"{usable} of {found['all']} usable"]
    limits += [f"a container allows the time of {quota:g}"] if quota else []
    text = f"{', '.join(limits)}; {around.here} rank{'s' if around.here > 1 else ''} here; load {found['load']:.1f}"
    if usable < around.here:
        leads_to = "ranks wait for each other's cores: each step takes a multiple of its time, and the bits stay"
        yield Finding("cores", "warning", text, leads_to, "start fewer ranks on this host, or give them more cores")
    else:
        yield Finding("cores", "ok", text)


def memory(facts: Facts, around: Around) -> Iterator[Finding]:
    """Hold the memory that is free, or that a container allows, against the ranks of the host."""
    found = facts["memory"]
    free = min(found["free"], found["limit"] or found["free"])
    text = f"{size(free)} free of {size(min(found['all'], found['limit'] or found['all']))}"
    text += f", {size(found['swapped'])} swapped out" if found["swapped"] > _GIB else ""
    each = free / around.here
    if each < _GIB:
        level: Any = "problem" if each < _GIB / 4 else "warning"
        text, leads_to = f"{text}: {size(each)} for each rank", "the kernel kills a rank when there is none left"
        remedy = "end other programs, start fewer ranks here, or raise the container's limit"
        yield Finding("memory", level, text, leads_to, remedy)
    elif found["swapped"] > _GIB:
        yield Finding("memory", "warning", text, "what was swapped out is read back slowly", "end other programs")
    else:
        yield Finding("memory", "ok", text)


def shared_memory(facts: Facts, _: Around) -> Iterator[Finding]:
    """Find a /dev/shm that is too small for the workers of a loader, as containers have it."""
    found = facts["memory"]
    if found["shared"] is None:
        return
    text = f"/dev/shm: {size(found['shared_free'])} free of {size(found['shared'])}"
    if found["shared_free"] < _GIB:
        leads_to = "workers of the loader, which hand over batches there, end with a bus error"
        yield Finding("shared memory", "warning", text, leads_to, "docker run --shm-size=8g, or placement.workers=0")
    else:
        yield Finding("shared memory", "ok", text)


def limits(facts: Facts, around: Around) -> Iterator[Finding]:
    """Hold the limits of this process against the connections and threads of so many ranks."""
    found, needed = facts["limits"], 256 + 8 * around.size  # Python, torch and the data; sockets of four groups
    files, processes, locked = found["files"], found["processes"], found["locked_bytes"]
    if files is not None and files < max(needed, 1024):
        level: Any = "problem" if files < needed else "warning"
        leads_to = "a run ends with `Too many open files`: each rank holds connections to all others"
        yield Finding("open files", level, f"at most {files:,}", leads_to, f"ulimit -n {max(4 * needed, 4096)}")
    else:
        yield Finding("open files", "ok", _at_most(files))
    if processes is not None and processes < 1024:
        leads_to = "threads and workers cannot be started; all of this user's count"
        yield Finding("processes", "warning", f"at most {processes:,}", leads_to, "ulimit -u 65536")
    else:
        yield Finding("processes", "ok", _at_most(processes))
    if locked is not None and found["fabric"]:
        leads_to = "InfiniBand cannot pin its memory: NCCL fails, or takes the slow network"
        yield Finding("locked memory", "warning", f"at most {size(locked)}", leads_to, "ulimit -l unlimited")
    else:
        yield Finding("locked memory", "ok", "unlimited" if locked is None else f"at most {size(locked)}")


def name(facts: Facts, around: Around) -> Iterator[Finding]:
    """Judge what the host's own name stands for: gloo listens there."""
    network, host = facts["network"], facts["host"]
    known, chosen = network["addresses"], facts["variables"].get("GLOO_SOCKET_IFNAME")
    text = f"{host} stands for {', '.join(known)}" if known else f"{host} stands for no address"
    if chosen or (known and not all(map(is_loopback, known))):
        yield Finding("host name", "ok", text)
    elif around.hosts == 1:
        yield Finding("host name", "ok", f"{text}: enough for one host; with several set GLOO_SOCKET_IFNAME")
    else:
        others = [
            each for each, found in network["interfaces"].items() if not all(map(is_loopback, found["addresses"]))
        ]
        leads_to = "gloo listens there, and ranks of other hosts cannot connect"
        remedy = f"give {host} its address of the network in /etc/hosts (Debian has 127.0.1.1 there), or "
        remedy += f"export GLOO_SOCKET_IFNAME={(others or ['INTERFACE'])[0]}"
        yield Finding("host name", "problem", f"{text}, which no other host can reach", leads_to, remedy)


def interface(facts: Facts, around: Around) -> Iterator[Finding]:
    """List the interfaces, and find one that a variable names and that is not there."""
    network, variables = facts["network"], facts["variables"]
    up = network["interfaces"]
    for variable in ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME"):
        asked = variables.get(variable, "")
        # NCCL takes beginnings of names, `=` before whole ones, and `^` before those to leave out.
        wanted = [each for each in asked.removeprefix("=").split(",") if each and not asked.startswith("^")]
        if wanted and not any(each.startswith(tuple(wanted)) for each in up):
            leads_to = "the ranks cannot connect: no process group can be made"
            remedy = f"unset {variable}, or name one of {', '.join(up)}"
            yield Finding("interfaces", "problem", f"{variable}={asked}: no such interface is up", leads_to, remedy)
    listed = [f"{each} {found['addresses'][0]}{_speed(found['mbit_s'])}" for each, found in up.items()]
    would = f"; gloo takes {network['gloo']} between hosts" if network["gloo"] else ""
    yield Finding("interfaces", "ok", f"{', '.join(listed)}{would}")


def port(facts: Facts, _: Around) -> Iterator[Finding]:
    """Find the port at which launchers let rank 0 listen in use."""
    for number, holder in facts["ports"].items():
        if holder:
            leads_to = "lockstep launch cannot meet there"
            yield Finding("port", "warning", f"{number} is held by {holder}", leads_to, "lockstep launch --port NUMBER")
        else:
            yield Finding("port", "ok", f"{number} is free")


def folder(facts: Facts, around: Around) -> Iterator[Finding]:
    """Judge the place of run folders: whether it can be written, room, and locks."""
    found = facts["folder"]
    place, text = found["folder"], f"{found['folder']}: {size(found['free'])} free"
    another = "choose another run.dir"
    if found["problem"]:
        leads_to = "a run there cannot keep its log and checkpoints"
        yield Finding("run folder", "problem", f"{place}: {found['problem']}", leads_to, another)
    elif not found["locks"]:
        leads_to = "two runs can write to one folder"
        yield Finding("run folder", "problem", f"{place}: files cannot be locked", leads_to, another)
    elif found["free"] < _GIB:
        leads_to = "a run ends when its checkpoint finds no room; older ones stay"
        yield Finding("run folder", "problem", text, leads_to, f"free some, or {another}")
    else:
        yield Finding("run folder", "ok", text)


# Each with the section of the facts that it judges, which is missing where that did not answer in time.
# OF_RANK is what each rank has for itself, OF_HOST what all ranks of a host share, and one of them has looked at.
OF_RANK: Final[tuple[tuple[str, Check], ...]] = (
    ("timed_out", timeouts),
    ("versions", versions),
    ("cards", cards),
    ("limits", limits),
    ("variables", lambda facts, _: of_variables(facts["variables"])),
)
OF_HOST: Final[tuple[tuple[str, Check], ...]] = (
    ("cores", cores),
    ("memory", memory),
    ("memory", shared_memory),
    ("network", name),
    ("network", interface),
    ("ports", port),
    ("folder", folder),
)
_HANGS: Final[Mapping[str, str]] = {
    "network": "the resolver of host names does not answer: see /etc/resolv.conf, or put the hosts in /etc/hosts",
    "run folder": "the file system hangs, as NFS does without its server: choose another run.dir",
    "host": "a driver hangs: look into dmesg",
}


def _counts(names: list[str]) -> str:
    return ", ".join(f"{names.count(each)} x {each}" for each in dict.fromkeys(names))


def _at_most(number: int | None) -> str:
    return "unlimited" if number is None else f"at most {number:,}"


def _speed(mbit_s: int) -> str:
    return f" ({mbit_s / 1e3:g} Gbit/s)" if mbit_s > 0 else ""
