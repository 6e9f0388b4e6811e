#!/usr/bin/env bash
# Start a program on ranks of several hosts by hand, over ssh:
#
#   launch/multi_node.sh [-n RANKS] [--ppn N] (--hosts LIST | --hostfile FILE) [OPTIONS] SCRIPT [ARGS ...]
#
#   --hosts LIST      h1,h2:4,node[01-03,07]; `:4` gives a host's slots
#   --hostfile FILE   a host per line, as above or as `h1 slots=4`; # begins a comment
#   --ppn N           slots of each host that names none (default: RANKS over the hosts, or 1)
#   -n RANKS          number of ranks (default: all slots); hosts are filled in the order given
#   --ssh COMMAND     in place of ssh, with its options (default: NCCLCOMM_SSH, or ssh)
#   -x NAME[,NAME]    further variables that the ranks get; docs/several_hosts.md lists what they get anyway
#   -m MODULE         in SCRIPT's place
#   --help            prints these lines
#
# Every host needs this folder, the script and the Python environment at the same path, and ssh without a password.
# PYTHON names the interpreter (default: python3); the mpiexec beside it is used, else the one on PATH. The exit status is
# mpiexec's; 1 if a host is lost; 2 if nothing was started. No process of the job outlives it on a host that is reached.
set -euo pipefail

readonly CHECK_S=20 GRACE_S=3 CHILDLESS_S=3
# A host that does not answer is given up after 9 to 12 s. In `--ssh`, the same options with other values win.
readonly SSH_OPTIONS="-o BatchMode=yes -o ConnectTimeout=5 -o ServerAliveInterval=3 -o ServerAliveCountMax=3"

say() { echo "$0: $*" >&2; }
die() { say "$@"; exit 2; }

# shellcheck source=launch/host_list.sh
. "$(dirname "$0")/host_list.sh"

if [[ ${1:-} == --help || ${1:-} == -h ]]; then
    sed -n '2,/^set /s/^# \{0,1\}//p' "$0"
    exit
fi

ranks='' ppn='' list='' hostfile='' agent=${NCCLCOMM_SSH:-ssh} extra=()
while (($#)) && [[ $1 == -* && $1 != -m ]]; do
    [[ -n ${2:-} ]] || die "$1 needs a value; see --help"
    case $1 in
    -n) is_count "$2" || die "-n '$2' is no number of ranks of 1 or more" && ranks=$2 ;;
    --ppn) is_count "$2" || die "--ppn '$2' is no number of ranks of 1 or more" && ppn=$2 ;;
    --hosts) list=$2 ;;
    --hostfile) hostfile=$2 ;;
    --ssh) agent=$2 ;;
    -x) IFS=, read -ra extra <<<"$2" ;;
    *) die "unknown option $1; options of the program come after it" ;;
    esac
    shift 2
done
[[ -n $list && -z $hostfile || -z $list && -n $hostfile ]] || die "name the hosts by one of --hosts and --hostfile"
if [[ -n $list ]]; then add_list --hosts "$list"; else add_file "$hostfile"; fi

(($#)) || die "no program given: name a Python file, or -m and a module"
script=
if [[ $1 == -m ]]; then
    [[ -n ${2:-} ]] || die "-m needs the name of a module"
else
    [[ -f $1 && -r $1 ]] || die "there is no file '$1' that can be read (in $PWD)"
    script=$1
fi
for word; do
    [[ $word != : ]] || die "mpiexec takes what follows a ':' for a second program: use \`ncclcomm run\`"
done

# A whole path, which the other hosts must have too; links stay, as an environment's python is one.
python=$(command -v "${PYTHON:-python3}") || die "no interpreter ${PYTHON:-python3}: set PYTHON"
python=$(cd "$(dirname "$python")" && pwd)/$(basename "$python")
mpiexec=$(dirname "$python")/mpiexec
if [[ ! -x $mpiexec ]] && ! mpiexec=$(command -v mpiexec); then
    die "no mpiexec beside $python or on PATH: pip install 'ncclcomm[mpich]'"
fi

for name in "${extra[@]}"; do
    [[ $name =~ ^[A-Za-z_][A-Za-z0-9_]*$ && -v $name ]] || die "-x: there is no variable '$name' in the environment"
done

# How many ranks each host gets; `unnamed` is for hosts that name no slots.
unnamed=${ppn:-1} named=$(printf %s "${slots[@]}")
if [[ -n $ranks && -z $ppn$named ]]; then
    unnamed=$(((ranks + ${#names[@]} - 1) / ${#names[@]}))
fi
total=0
for index in "${!names[@]}"; do
    : "${slots[index]:=$unnamed}"
    ((total += slots[index]))
done
left=${ranks:=$total} places='' used=() counts=()
((ranks <= total)) || die "-n $ranks is more than the hosts' $total slots; add hosts, or raise --ppn or their slots"
for index in "${!names[@]}"; do
    count=$((slots[index] < left ? slots[index] : left))
    ((count)) || break
    left=$((left - count))
    used+=("${names[index]}")
    counts+=("$count")
    places+=${places:+,}${names[index]}:$count
done

read -ra agent_words <<<"$agent"
agent_words[0]=$(command -v "${agent_words[0]}") || die "--ssh: there is no command '${agent%% *}'"
read -ra options <<<"$SSH_OPTIONS"
agent_words+=("${options[@]}")

# Every rank bears this, by which whatever a broken job leaves behind is found.
launch_id=$(od -An -N12 -tx1 /dev/urandom | tr -d ' \n')

# Runs on every host while the job does: looks whether it could run there, says so, and waits for the end of its input,
# which comes when this script ends in whatever way. Then it kills what is left of the job.
# shellcheck disable=SC2016
readonly WATCH='
id=$1 host=$2 folder=$3 python=$4 script=$5
fail() { echo "$id failed $host $*"; exit 1; }
cd "$folder" 2>/dev/null || fail "has no folder $folder; the project must be at the same path on every host"
[ -x "$python" ] || fail "has no $python; the Python environment must be at the same path on every host"
[ -z "$script" ] || [ -r "$script" ] || fail "has no file $script in $folder"
cores=$("$python" -c "import os, mpi4py; print(len(os.sched_getaffinity(0)))" 2>/dev/null </dev/null) ||
    fail "has no mpi4py that works in the environment of $python"
echo "$id ready $host ${cores##*[!0-9]}"
cat >/dev/null
end=$(($(date +%s) + 10))
# The status of grep is an error where a process ends meanwhile.
while found=$(grep -sl "NCCLCOMM_LAUNCH_ID=$id" /proc/[0-9]*/environ | tr -dc "0-9\n" | xargs); [ -n "$found" ]; do
    kill -9 $found 2>/dev/null
    [ "$(date +%s)" -lt "$end" ] || { echo "processes $found do not end on SIGKILL" >&2; exit 9; }
    sleep 0.05
done
exit 0'

work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
mkfifo "$work/hold" "$work/events"
# Both ends of each: opening one alone would wait for the other.
exec {hold}<>"$work/hold" {events}<>"$work/events"

# quoted WORD ...: for the shell of another host, whichever that is.
quoted() { printf " '%s'" "${@//\'/\'\\\'\'}"; }

# stop_job PID: end it, also an mpiexec that waits for a host that is gone.
stop_job() {
    kill -TERM "$1" 2>/dev/null || return 0
    timeout "$GRACE_S" tail -s 0.1 --pid="$1" -f /dev/null || kill -KILL "$1" 2>/dev/null || true
}

# watch HOST: keep a connection to it; if that breaks while the job runs, the job cannot end well, and is ended.
watch() {
    local status=0
    "${agent_words[@]}" "$1" "sh -c$(quoted "$WATCH" watch "$launch_id" "$1" "$PWD" "$python" "$script")" \
        <"$work/hold" >&"$events" 2>"$work/$1.err" {hold}>&- || status=$?
    echo "$status" >"$work/$1.end"
    echo "$launch_id ended $1" >&"$events"
    [[ ! -e $work/job ]] || stop_job "$(<"$work/job")"
}

# reason HOST: the last thing that ssh said.
reason() { tail -n 1 "$work/$1.err" | grep . || echo "${agent_words[0]} ended with status $(<"$work/$1.end")"; }

# is_alone PID: whether a process has no child that lives.
is_alone() {
    local file children child stat
    for file in /proc/"$1"/task/*/children; do
        read -ra children <"$file" || true
        for child in "${children[@]}"; do
            ! { read -r stat <"/proc/$child/stat"; } 2>/dev/null || [[ $stat == *") Z "* ]] || return 1
        done
    done
}

# Says so where no rank of the job is left. Whatever else a host or its shell prints, or a host that is silent, doesn't.
# shellcheck disable=SC2016
readonly NO_RANKS='
found=$(grep -sl "NCCLCOMM_LAUNCH_ID=$1" /proc/[0-9]*/environ | xargs -r grep -slz "^OMPI_COMM_WORLD_RANK=")
[ -n "$found" ] || echo "$1 has no rank here"'

# has_ranks: whether a rank lives on some host, or may, as a host does not answer.
has_ranks() {
    local host said
    for host in "${used[@]}"; do
        said=$("${agent_words[@]}" "$host" "sh -c$(quoted "$NO_RANKS" look "$launch_id")" 2>/dev/null </dev/null) || true
        [[ $said == *"$launch_id has no rank here"* ]] || return 0
    done
    return 1
}

# end_hung PID: kill an mpiexec that has no ranks any more and does not end. Open MPI 5.0's has a deadlock after MPI_Abort.
end_hung() {
    local began=0 childless=0 wait_s=$CHILDLESS_S
    while [[ -e $work/job ]]; do
        read -r -t 1 -u "$events" _ || true
        if ! is_alone "$1"; then began=1 childless=0 && continue; fi 2>/dev/null
        ((began && ++childless >= wait_s)) || continue
        if ! has_ranks; then
            [[ ! -e $work/job ]] || { touch "$work/hung" && kill -KILL "$1"; }
            return
        fi
        # Ranks that its ssh left behind go on.
        childless=0 wait_s=30
    done
}

watches=()
for host in "${used[@]}"; do
    (exec {hold}>&- && watch "$host") 2>/dev/null &
    watches+=($!)
done

declare -A told=() cores=()
trouble=0
end=$((SECONDS + CHECK_S))
while ((${#told[@]} < ${#used[@]} && SECONDS < end)); do
    read -r -t $((end - SECONDS)) -u "$events" token what host text || break
    # Anything else comes from the start-up files of a host's shell.
    [[ $token == "$launch_id" && -z ${told[$host]:-} ]] || continue
    told[$host]=$what
    case $what in
    ready) ! is_count "$text" || cores[$host]=$text ;;
    failed) say "host $host $text" && trouble=1 ;;
    ended) say "host $host can't be reached: $(reason "$host")" && trouble=1 ;;
    esac
done
for host in "${used[@]}"; do
    [[ -n ${told[$host]:-} ]] || { say "host $host did not answer within $CHECK_S s" && trouble=1; }
done
((!trouble)) || exit 2

# forwarded NAME: whether ranks on other hosts get a variable without -x; ssh itself passes nothing on.
forwarded() {
    case $1 in
    PATH | LD_LIBRARY_PATH | LD_PRELOAD | VIRTUAL_ENV | PYTHON* | NCCLCOMM_* | NCCL_* | CUDA_* | CUPY_*) return 0 ;;
    OMP_* | OPENBLAS_* | MKL_* | NUMEXPR_* | FI_* | UCX_* | MPIR_CVAR_* | I_MPI_*) return 0 ;;
    esac
    return 1
}

# setting NAME VALUE: export a variable, and show it, unless it is set already.
settings=()
setting() {
    [[ -v $1 ]] && return
    export "$1=$2"
    settings+=("$1=$2")
}

# An MPI spins for speed where a rank has a core of its own, and must not where it hasn't.
crowded=0
here=$(env -u OMP_NUM_THREADS -u OMP_THREAD_LIMIT nproc)
for index in "${!used[@]}"; do
    # A python that prints lines of its own may have hidden the number.
    ((counts[index] <= ${cores[${used[index]}]:-here})) || crowded=1
done
version=$("$mpiexec" --version 2>&1) || true
if [[ $version == *"Open MPI"* ]]; then
    flavour=openmpi
    # Two ranks would each be pinned to one core, their threads with them.
    setting PRTE_MCA_hwloc_default_binding_policy none
    ((!crowded)) || setting OMPI_MCA_mpi_yield_when_idle 1
    if ((EUID == 0)); then
        # Open MPI refuses to start as root, as in a container, without both.
        setting OMPI_ALLOW_RUN_AS_ROOT 1
        setting OMPI_ALLOW_RUN_AS_ROOT_CONFIRM 1
    fi
elif [[ $version == *"Intel(R) MPI"* ]]; then
    flavour=intelmpi
    # Each rank would be pinned to its share of the cores, its threads with it.
    setting I_MPI_PIN off
else
    flavour=mpich
    # It takes libfabric's `sockets` before its `tcp`, which is slower and hung in some runs; InfiniBand stays open.
    setting FI_PROVIDER ^sockets,udp
    ((!crowded)) || setting MPIR_CVAR_CH4_NETMOD ofi
fi

settings+=("NCCLCOMM_LAUNCH_ID=$launch_id")
variables=(NCCLCOMM_LAUNCH_ID)
while IFS= read -r name; do
    if forwarded "$name"; then variables+=("$name"); fi
done < <(compgen -e)
for name in "${extra[@]}"; do
    forwarded "$name" || variables+=("$name")
done

# mpi4py.run calls MPI_Abort when a rank raises; under plain python the others would wait for it for ever.
program=("$python" -m mpi4py "$@")
if [[ $flavour == openmpi ]]; then
    command=("$mpiexec" --prtemca plm_ssh_agent "${agent_words[*]}" --host "$places" --map-by slot)
    for name in "${variables[@]}"; do command+=(-x "$name"); done
else
    # Hydra, MPICH's and Intel MPI's. Each reads its own variable for the options of ssh.
    extra_args=HYDRA_LAUNCHER_EXTRA_ARGS
    [[ $flavour == mpich ]] || extra_args=I_MPI_HYDRA_BOOTSTRAP_EXEC_EXTRA_ARGS
    settings+=("$extra_args=${agent_words[*]:1}")
    export "$extra_args=${agent_words[*]:1}"
    command=("$mpiexec" -launcher ssh -launcher-exec "${agent_words[0]}" -genvlist "$(IFS=, && echo "${variables[*]}")")
    # With -genvlist MPICH 5.0.2 loses the last entry of its environment; `env` puts one there that nobody needs.
    [[ $flavour == intelmpi ]] || command=(env -u NCCLCOMM_LAST NCCLCOMM_LAST=1 "${command[@]}")
    [[ $flavour == intelmpi ]] || command+=(-hosts "$places")
fi
if [[ $flavour == intelmpi ]]; then
    # It reads no `:COUNT` behind a host: a part of the command for each.
    for index in "${!used[@]}"; do
        ((!index)) || command+=(:)
        command+=(-host "${used[index]}" -n "${counts[index]}" "${program[@]}")
    done
else
    command+=(-n "$ranks" "${program[@]}")
fi

printf '+'
printf ' %q' "${settings[@]}" "${command[@]}"
printf '\n'
caught=0 status=0 guard=''
NCCLCOMM_LAUNCH_ID=$launch_id "${command[@]}" <&0 {hold}>&- {events}>&- &
job=$!
trap 'caught=2; stop_job "$job"' INT
trap 'caught=15; stop_job "$job"' TERM
trap 'caught=1; stop_job "$job"' HUP
echo "$job" >"$work/job"
# One that broke before there was a job to end.
! compgen -G "$work/*.end" >/dev/null || stop_job "$job"
if [[ $version == *"(Open MPI) 5"* ]]; then
    (exec {hold}>&- && end_hung "$job") 2>/dev/null &
    guard=$!
fi
# Without what bash says of one that was killed.
wait "$job" 2>/dev/null || status=$?
[[ -z $guard ]] || kill "$guard" 2>/dev/null || true
rm "$work/job"
exec {hold}>&-
wait "${watches[@]}" || true
for host in "${used[@]}"; do
    case $(<"$work/$host.end") in
    0) ;;
    9) say "host $host: $(reason "$host")" ;;
    # Open MPI's mpiexec may report success then.
    *) say "host $host was lost: $(reason "$host")" && status=1 ;;
    esac
done
if [[ -e $work/hung ]]; then
    say "all ranks have ended, but mpiexec did not, and was killed: how the ranks ended is not known" && status=1
fi
((!caught)) || status=$((128 + caught))
exit "$status"
