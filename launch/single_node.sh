#!/usr/bin/env bash
# Start a program on several ranks of this host by hand, without `ncclcomm run`:
#
#   launch/single_node.sh N SCRIPT [ARGS ...]        (-m MODULE in SCRIPT's place works too)
#
# PYTHON names the interpreter (default: python3). The mpiexec beside it is used, else the one on PATH: it must belong
# to the MPI that this interpreter's mpi4py loads: MPICH, Open MPI or Intel MPI. The exit status is mpiexec's; 2 if
# nothing was started. --help prints these lines.
set -euo pipefail

die() { echo "$0: $*" >&2; exit 2; }

if [[ ${1:-} == --help || ${1:-} == -h ]]; then
    sed -n '2,/^set /s/^# \{0,1\}//p' "$0"
    exit
fi
if (( $# < 2 )) || ! [[ $1 =~ ^[1-9][0-9]{0,5}$ ]]; then
    echo "usage: $0 N SCRIPT [ARGS ...]   N: number of ranks, 1 or more; got: $*" >&2
    exit 2
fi
ranks=$1
shift
if [[ $1 == -m ]]; then
    [[ -n ${2:-} ]] || die "-m needs the name of a module"
else
    [[ -f $1 && -r $1 ]] || die "there is no file '$1' that can be read (in $PWD)"
fi
for word; do
    [[ $word != : ]] || die "mpiexec takes what follows a ':' for a second program: use \`ncclcomm run\`"
done

python=$(command -v "${PYTHON:-python3}") || die "no interpreter ${PYTHON:-python3}: set PYTHON"
mpiexec=$(dirname "$python")/mpiexec
if [[ ! -x $mpiexec ]] && ! mpiexec=$(command -v mpiexec); then
    die "no mpiexec beside $python or on PATH: pip install 'ncclcomm[mpich]'"
fi

# Prints the variable and exports it, unless it is set already.
settings=()
setting() {
    [[ -v $1 ]] && return
    export "$1=$2"
    settings+=("$1=$2")
}

version=$("$mpiexec" --version 2>&1) || true
if [[ $version == *"Open MPI"* ]]; then
    # More ranks than cores are refused without it.
    setting PRTE_MCA_rmaps_default_mapping_policy :oversubscribe
    # Two ranks would each be pinned to one core, their threads with them.
    setting PRTE_MCA_hwloc_default_binding_policy none
    # One host needs no network interfaces; looking for them slows the start.
    setting OMPI_MCA_btl ^ofi
    if (( ranks > $(env -u OMP_NUM_THREADS -u OMP_THREAD_LIMIT nproc) )); then
        # A rank that waits gives its core to one that works.
        setting OMPI_MCA_mpi_yield_when_idle 1
    fi
    if (( EUID == 0 )); then
        # Open MPI refuses to start as root, as in a container, without both.
        setting OMPI_ALLOW_RUN_AS_ROOT 1
        setting OMPI_ALLOW_RUN_AS_ROOT_CONFIRM 1
    fi
elif [[ $version == *"Intel(R) MPI"* ]]; then
    # Each rank would be pinned to its share of the cores, its threads with it.
    setting I_MPI_PIN off
elif (( ranks > $(env -u OMP_NUM_THREADS -u OMP_THREAD_LIMIT nproc) )); then
    # MPICH: the other network module spins without giving the core away.
    setting MPIR_CVAR_CH4_NETMOD ofi
fi

# mpi4py.run calls MPI_Abort when a rank raises; under plain python the others would wait for it for ever.
command=("$mpiexec" -n "$ranks" "$python" -m mpi4py "$@")
printf '+'
printf ' %q' "${settings[@]}" "${command[@]}"
printf '\n'
exec "${command[@]}"
