"""What SLURM says of the allocation that this process is in, read from its variables, without scontrol.

Everything here works on the texts that it is handed, except `mpi_types`, which asks `srun`.
"""

from __future__ import annotations

import itertools
import re
import subprocess
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from ncclcomm.errors import ArgumentError, BackendUnavailableError

__all__ = [
    "Allocation",
    "allocation",
    "expand_hosts",
    "mpi_types",
    "parse_mpi_list",
    "split_hosts",
    "srun_mpi",
    "task_counts",
]

MOST_HOSTS = 65536
"""As in SLURM: a longer list is a typing error, and would fill the memory."""
MOST_TASKS = 2**31 - 1

_ASK_TIMEOUT_S = 20.0
_FIRST_SPECIAL_STEP = 0xFFFFFFF0
"""Steps from here on are no srun of the user's: the batch script, the shell that salloc opens on a node."""
_NUMBER = re.compile(r"[0-9]{1,18}", re.ASCII)
_RANGE = re.compile(r"([0-9]{1,18})(?:-([0-9]{1,18}))?", re.ASCII)
_NAME = re.compile(r"[A-Za-z0-9_.\-]+", re.ASCII)
_COUNT = re.compile(r"([0-9]{1,10})(?:\(x([0-9]{1,10})\))?", re.ASCII)
_SRUN_MPI = {"MPICH": ("pmi2",), "Intel MPI": ("pmi2", "pmix"), "Open MPI": ("pmix",)}
"""What ranks of each flavour find each other by, the best first. cray_shasta is on any list, so not guessed."""


@dataclass(frozen=True)
class Allocation:
    """The nodes that SLURM gave to the job which this process is a part of."""

    job_id: str
    nodes: tuple[str, ...]
    """Names of the job's nodes in SLURM's order, one or more."""
    tasks_per_node: tuple[int, ...] | None = None
    """Number of tasks on each of `nodes`: the job's, or within a step over all of them the step's; None if unknown."""
    cpus_per_node: tuple[int, ...] | None = None
    """Number of CPUs (SLURM's word for cores or hardware threads) that the job has on each of `nodes`."""
    cpus_per_task: int | None = None
    """CPUs asked for each task; None where the job did not ask."""
    gpus_per_node: int | None = None
    """GPUs asked for on each node, else how many this process's node gave; None where no GPUs are spoken of."""
    gpus_per_task: int | None = None
    """GPUs asked for each task; None where the job did not ask."""
    in_task: bool = False
    """True in a task that srun started; False in a batch script and in the shell that salloc opens."""

    @property
    def size(self) -> int | None:
        """Number of tasks on all nodes; None if unknown."""
        return None if self.tasks_per_node is None else sum(self.tasks_per_node)


def allocation(environ: Mapping[str, str]) -> Allocation | None:
    """The allocation that the variables speak of; an empty variable counts as unset.

    Args:
        environ: the variables of a batch script, of salloc's shell, or of a task.

    Returns:
        None where SLURM_JOB_ID or the list of nodes is not set.

    Raises:
        ArgumentError: a variable makes no sense, or two contradict each other; names them and their texts.
    """
    job_id = environ.get("SLURM_JOB_ID", "").strip()
    where = "SLURM_JOB_NODELIST" if environ.get("SLURM_JOB_NODELIST", "").strip() else "SLURM_NODELIST"
    listed = environ.get(where, "").strip()
    if not job_id or not listed:
        return None
    if not _NUMBER.fullmatch(job_id):
        raise ArgumentError(f"SLURM_JOB_ID={job_id!r} is no job's number; unset it if this is no SLURM job")
    nodes = expand_hosts(listed, where)
    step = environ.get("SLURM_STEP_ID", "")
    in_step = _NUMBER.fullmatch(step) is not None and "SLURM_LOCALID" in environ
    tasks = _per_node(environ, "SLURM_TASKS_PER_NODE", where, nodes, in_step)
    asked_gpus = _gpus(environ, "SLURM_GPUS_PER_NODE")
    return Allocation(
        job_id=job_id,
        nodes=nodes,
        tasks_per_node=tasks,
        cpus_per_node=_per_node(environ, "SLURM_JOB_CPUS_PER_NODE", where, nodes, in_step),
        cpus_per_task=_whole(environ, "SLURM_CPUS_PER_TASK", least=1),
        gpus_per_node=_whole(environ, "SLURM_GPUS_ON_NODE", least=0) if asked_gpus is None else asked_gpus,
        gpus_per_task=_gpus(environ, "SLURM_GPUS_PER_TASK"),
        in_task=in_step and int(step) < _FIRST_SPECIAL_STEP,
    )


def expand_hosts(text: str, variable: str = "SLURM_JOB_NODELIST") -> tuple[str, ...]:
    """The names that a list of hosts stands for, in the order of `scontrol show hostnames`.

    Names that are listed twice come twice. Digits are filled with zeros to the width of a range's lower end. Text may
    follow the brackets, which scontrol refuses; what scontrol quietly mends (empty entries, a bracket left open) is an
    error.

    Args:
        text: such as `a[01-03,7],b,c[1-2]-ib[0-1]`; not empty.
        variable: where the text is from, for the error.

    Raises:
        ArgumentError: the text is no list of hosts, or stands for more than 65536; names `variable` and the text.
    """
    found: list[str] = []
    for entry in split_hosts(text, variable):
        fixed, ranges = _parse_entry(entry, text, variable)
        total = len(found)
        names = 1
        for choices in ranges:
            names *= sum(len(choice) for choice, _ in choices)
        if total + names > MOST_HOSTS:
            raise ArgumentError(
                f"{variable}={text!r}: {entry!r} makes more than {MOST_HOSTS} hosts; is a range mistyped?"
            )
        found.extend(_names(fixed, ranges))
    return tuple(found)


def split_hosts(text: str, variable: str = "SLURM_JOB_NODELIST") -> tuple[str, ...]:
    """Cut a list of hosts at the commas outside of brackets.

    Args:
        text: such as `a[1,2]:4,b`, which gives `a[1,2]:4` and `b`; what the entries are is not looked at.
        variable: where the text is from, for the error.

    Raises:
        ArgumentError: an entry is empty, or brackets don't match or lie in each other; names `variable` and the text.
    """
    entries, start, depth = [], 0, 0
    for index, char in enumerate(f"{text},"):
        depth += {"[": 1, "]": -1}.get(char, 0)
        if depth not in (0, 1):
            break
        if char == "," and depth == 0:
            entries.append(text[start:index])
            start = index + 1
    if depth:
        raise ArgumentError(f"{variable}={text!r}: the brackets don't match; write a[01-03,7],b")
    if not all(entries):
        raise ArgumentError(f"{variable}={text!r} has an empty entry; write host names with one comma between them")
    return tuple(entries)


def task_counts(text: str, variable: str = "SLURM_TASKS_PER_NODE") -> tuple[int, ...]:
    """The number for each node that SLURM's short form stands for.

    Args:
        text: such as `4(x2),3`, which gives 4, 4, 3.
        variable: where the text is from, for the error.

    Raises:
        ArgumentError: the text has another form, or is for more than 65536 nodes; names `variable` and the text.
    """
    counts: list[int] = []
    for item in text.split(","):
        form = _COUNT.fullmatch(item)
        count, times = (int(form[1]), int(form[2] or 1)) if form else (0, 0)
        if form is None or times == 0 or count > MOST_TASKS:
            raise ArgumentError(f"{variable}={text!r}: {item!r} is no number for a node; expected such as 4(x2),3")
        if len(counts) + times > MOST_HOSTS:
            raise ArgumentError(f"{variable}={text!r} is for more than {MOST_HOSTS} nodes")
        counts.extend([count] * times)
    return tuple(counts)


def parse_mpi_list(text: str) -> tuple[str, ...]:
    """The types that `srun --mpi=list` has printed, in its order.

    Args:
        text: what it printed, on either stream: SLURM before 22.05 writes to stderr, each line after `srun: `.
    """
    types: list[str] = []
    for line in text.splitlines():
        entry = re.sub(r"^srun:\s*", "", line.strip())
        _, colon, versions = entry.partition("versions available:")
        words = versions.replace(",", " ").split() if colon else [entry]
        types.extend(word for word in words if re.fullmatch(r"[a-z][a-z0-9_]*", word) and word not in types)
    return tuple(types)


def mpi_types(environ: Mapping[str, str], srun: str = "srun") -> tuple[str, ...]:
    """Ask srun for the values that its --mpi takes here.

    Args:
        environ: the whole environment for srun.
        srun: its name or path.

    Raises:
        BackendUnavailableError: there is no srun, or it fails, names no type, or does not answer within 20 s.
    """
    try:
        asked = subprocess.run(
            [srun, "--mpi=list"],
            env=dict(environ),
            capture_output=True,
            text=True,
            errors="replace",
            stdin=subprocess.DEVNULL,
            timeout=_ASK_TIMEOUT_S,
            check=False,
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        raise BackendUnavailableError(f"`{srun} --mpi=list` gives no answer: {error}; load SLURM's clients") from error
    types = parse_mpi_list(f"{asked.stdout}\n{asked.stderr}")
    if asked.returncode or not types:
        said = (asked.stderr.strip() or asked.stdout.strip() or "nothing").splitlines()[-1]
        raise BackendUnavailableError(f"`{srun} --mpi=list` exits {asked.returncode}, and says: {said}")
    return types


def srun_mpi(flavour: str, types: tuple[str, ...]) -> str | None:
    """The value of srun's --mpi by which ranks of an MPI find each other.

    Args:
        flavour: "MPICH", "Intel MPI" or "Open MPI".
        types: what `mpi_types` found.

    Returns:
        None where no type fits: start the ranks with that MPI's own mpiexec.
    """
    for wanted in _SRUN_MPI[flavour]:
        if wanted in types:
            return wanted
        if versions := [name for name in types if re.fullmatch(rf"{wanted}_v[0-9]+", name)]:
            return max(versions, key=lambda name: int(name.rpartition("v")[2]))
    return None


def _parse_entry(entry: str, text: str, variable: str) -> tuple[list[str], list[list[tuple[range, int]]]]:
    """The texts around an entry's brackets, which are known to match, and the ranges with their widths in each."""
    pieces = re.split(r"[][]", entry)
    fixed, brackets = pieces[::2], pieces[1::2]
    if not all(_NAME.fullmatch(piece) or not piece for piece in fixed) or entry[0] in "-.":
        raise ArgumentError(f"{variable}={text!r}: {entry!r} is no host name, nor names with ranges such as a[01-03,7]")
    ranges = []
    for bracket in brackets:
        choices = []
        for part in bracket.split(","):
            form = _RANGE.fullmatch(part)
            low, high = (int(form[1]), int(form[2] or form[1])) if form else (0, 0)
            if form is None or low > high:
                raise ArgumentError(f"{variable}={text!r}: {part!r} in {entry!r} is no number or rising range as 01-03")
            choices.append((range(low, high + 1), len(form[1])))
        ranges.append(choices)
    return fixed, ranges


def _names(fixed: list[str], ranges: list[list[tuple[range, int]]]) -> Iterator[str]:
    """Every choice of one number from each bracket: SLURM counts up the last bracket fastest, then the first ones."""
    choices = [[f"{number:0{width}d}" for part, width in bracket for number in part] for bracket in ranges]
    outer_first = [*reversed(choices[:-1]), *choices[-1:]]
    for chosen in itertools.product(*outer_first):
        numbers = [*reversed(chosen[:-1]), *chosen[-1:], ""]
        yield "".join(itertools.chain.from_iterable(zip(fixed, numbers, strict=True)))


def _per_node(
    environ: Mapping[str, str], variable: str, where: str, nodes: tuple[str, ...], in_step: bool
) -> tuple[int, ...] | None:
    """A number for each of the nodes; None where unset, and for a step that has fewer nodes than the job."""
    text = environ.get(variable, "").strip()
    if not text:
        return None
    counts = task_counts(text, variable)
    if len(counts) == len(nodes):
        return counts
    if in_step:
        return None
    raise ArgumentError(
        f"{variable}={text!r} is for {len(counts)} nodes, but {where}={environ[where]!r} names {len(nodes)}; "
        "one of them is not this job's: start again in a new job, or unset both"
    )


def _whole(environ: Mapping[str, str], variable: str, least: int) -> int | None:
    """A whole number; None where unset."""
    text = environ.get(variable, "").strip()
    if not text:
        return None
    if not re.fullmatch(r"[0-9]{1,9}", text) or int(text) < least:
        raise ArgumentError(f"{variable}={text!r} is no whole number of {least} or more")
    return int(text)


def _gpus(environ: Mapping[str, str], variable: str) -> int | None:
    """The sum of a request for GPUs, such as `4`, `a100:4` or `a100:2,v100:1`; None where unset."""
    text = environ.get(variable, "").strip()
    if not text:
        return None
    forms = [re.fullmatch(r"(?:[^,]+:)?([0-9]{1,9})", item) for item in text.split(",")]
    if not all(forms):
        raise ArgumentError(f"{variable}={text!r} is no number of GPUs, such as 4 or a100:4")
    return sum(int(form[1]) for form in forms if form)
