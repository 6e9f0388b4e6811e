#!/usr/bin/env bash
# A real Slurm on the fake hosts of hosts.sh, which must be up:
#
#   slurm.sh up N [GPUS [CPUS]]   slurmctld and munged in h1, a slurmd in each of h1 to hN; returns when all nodes are idle
#   slurm.sh down                 end the daemons and what they run, and remove the state
#
# Every node claims GPUS (4) GPUs, which are copies of /dev/null, and CPUS (16) cores, whatever the machine has. The
# daemons listen inside the hosts only. FH is the folder of the hosts' state; Slurm's is FH/slurm, so that `hosts.sh down`
# ends and removes Slurm too. Clients run inside a host:
#
#   hosts.sh exec h1 env SLURM_CONF=$FH/slurm/slurm.conf sbatch job.sh
#
# Needs root, slurmctld, slurmd, munge, the Slurm clients and, for --mpi=pmix, libpmix-dev.
set -euo pipefail
: "${FH:?names no folder with the state of the hosts}"
here=$(dirname "$(readlink -f "$0")")
state=$FH/slurm
deadline_s=30
export SLURM_CONF=$state/slurm.conf
# Debian keeps the daemons where a user's PATH does not look.
PATH=$PATH:/usr/sbin:/sbin

# until_true WHAT COMMAND ...: poll a command until it succeeds.
until_true() {
    local what=$1 end=$((SECONDS + deadline_s))
    shift
    until "$@"; do
        if ((SECONDS > end)); then
            echo "$0: not within $deadline_s s: $what" >&2
            tail -n 20 "$state"/log/* >&2
            return 1
        fi
        sleep 0.05
    done
}

in_host() {
    "$here/hosts.sh" exec "$@"
}

write_config() {
    local nodes="h[1-$1]" gpus=$2 cpus=$3 i
    cat >"$SLURM_CONF" <<END
ClusterName=test
SlurmctldHost=h1
AuthType=auth/munge
AuthInfo=socket=$state/munge/socket
CryptoType=crypto/munge
SlurmUser=root
SlurmdUser=root
StateSaveLocation=$state/saved
SlurmdSpoolDir=$state/spool/%n
SlurmctldPidFile=$state/slurmctld.pid
SlurmdPidFile=$state/slurmd.%n.pid
SlurmctldLogFile=$state/log/slurmctld
SlurmdLogFile=$state/log/slurmd.%n
# Without systemd and cgroups, as in a container.
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
JobAcctGatherType=jobacct_gather/none
AccountingStorageType=accounting_storage/none
JobCompType=jobcomp/none
SwitchType=switch/none
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
SchedulerParameters=batch_sched_delay=0
# As most sites have it: srun without --mpi starts unconnected tasks.
MpiDefault=none
ReturnToService=2
SlurmctldTimeout=30
SlurmdTimeout=10
KillWait=1
GresTypes=gpu
# The claimed cores are not there.
SlurmdParameters=config_overrides
NodeName=$nodes CPUs=$cpus Boards=1 Sockets=1 CoresPerSocket=$cpus ThreadsPerCore=1 RealMemory=4000 Gres=gpu:$gpus State=UNKNOWN
PartitionName=main Nodes=ALL Default=YES MaxTime=INFINITE State=UP
END
    for ((i = 0; i < gpus; i++)); do mknod "$state/gpu$i" c 1 3; done
    echo "NodeName=$nodes Name=gpu File=$state/gpu[0-$((gpus - 1))]" >"$state/gres.conf"
    # The one place that the hosts do not share; the daemons' sockets would collide in any other.
    echo "PMIxCliTmpDirBase=/dev/shm" >"$state/mpi.conf"
}

idle_nodes_are() {
    [[ $(in_host h1 sinfo -h -N -t idle -o %N 2>/dev/null | wc -l) == "$1" ]]
}

up() {
    local i
    mkdir -p "$state"/{saved,log,munge,spool}
    chmod 755 "$FH" "$state" "$state/munge"
    (umask 077 && head -c 1024 /dev/urandom >"$state/munge/key")
    write_config "$1" "${2:-4}" "${3:-16}"
    in_host h1 munged --force --socket="$state/munge/socket" --key-file="$state/munge/key" --pid-file="$state/munge/pid" \
        --log-file="$state/log/munged" --seed-file="$state/munge/seed"
    until_true "munged listens" test -S "$state/munge/socket"
    in_host h1 slurmctld
    for ((i = 1; i <= $1; i++)); do
        mkdir "$state/spool/h$i"
        in_host "h$i" slurmd
    done
    until_true "$1 nodes are idle" idle_nodes_are "$1"
}

# Jobs first: they would outlive their daemons. Those save nothing that is kept, and take seconds to end of themselves.
down() {
    local file pids=()
    if [[ -e $state/slurmctld.pid ]]; then
        in_host h1 scancel --quiet --full --me
        until_true "no job is left" no_jobs
    fi
    for file in "$state"/*.pid "$state/munge/pid"; do
        [[ ! -e $file ]] || pids+=("$(<"$file")")
    done
    if ((${#pids[@]})); then
        kill -9 "${pids[@]}" || true
        until_true "the daemons end" gone "${pids[@]}"
    fi
    rm -rf "$state"
}

gone() {
    # kill succeeds if any of them is there.
    ! kill -0 "$@" 2>/dev/null
}

no_jobs() {
    local jobs
    jobs=$(in_host h1 squeue -h -o %i) && [[ -z $jobs ]]
}

case ${1:-} in
up) up "$2" "${3:-4}" "${4:-16}" ;;
down) down ;;
*)
    echo "usage: FH=FOLDER $0 up N [GPUS [CPUS]] | down, see the head of the file; got: $*" >&2
    exit 2
    ;;
esac
