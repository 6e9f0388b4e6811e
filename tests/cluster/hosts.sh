#!/usr/bin/env bash
# Fake hosts on one machine, named h1, h2, ...:
#
#   hosts.sh up N [RATE]         make N hosts; RATE (such as 1gbit) limits what each one sends
#   hosts.sh exec HOST CMD ...   become a command in a host, in the same folder
#   hosts.sh pids HOST           processes that run in a host, without the one that holds it
#   hosts.sh bytes               what each host has received and sent
#   hosts.sh shape RATE|off      limit what each host sends, or no longer
#   hosts.sh cut HOST            unplug a host's cable: its peers hear nothing more
#   hosts.sh crash HOST          kill -9 everything in a host, and the host with it
#   hosts.sh down                crash all that is left and remove the state
#
# Each is a set of net, uts, ipc and mount namespaces that one sleeping process holds, with its own name, address
# 10.77.0.N, /etc/hosts and /dev/shm. They meet on a bridge in one more namespace, so nothing reaches the machine's own
# network and any number of these sets can be up at once. Files are shared, as on a cluster's file system.
#
# FH names the folder for the state; one set of hosts each. With FH_OWNER set to a process, the hosts go when it ends,
# however it ends. Needs root, iproute2 and util-linux. nsrsh beside this file stands in for ssh.
set -euo pipefail
: "${FH:?names no folder for the state of these hosts}"
me=$(readlink -f "$0")

# Process that holds a host; fails as ssh does for a host that is not there.
holder() {
    if [[ ! -e $FH/$1.pid ]]; then
        echo "$me: no host $1: never made, or crashed" >&2
        exit 255
    fi
    cat "$FH/$1.pid"
}

# hold NAME COMMANDS: make namespaces, run the commands in them and keep them.
hold() {
    mkfifo "$FH/$1.ready"
    setsid unshare --net --uts --ipc --mount --propagation private \
        bash -euc "$2; echo up >&3; exec 3>&-; exec sleep infinity" </dev/null >/dev/null 2>"$FH/$1.err" 3>"$FH/$1.ready" &
    echo $! >"$FH/$1.pid"
    # Ends early if the other end closes the pipe without a word.
    if ! read -r -t 20 _ <"$FH/$1.ready"; then
        cat "$FH/$1.err" >&2
        return 1
    fi
}

in_net() {
    local pid=$1
    shift
    nsenter -t "$pid" --net "$@"
}

# Everything in the network namespace of a process, itself included.
mates() {
    local net
    net=$(readlink "/proc/$1/ns/net") || return 0
    find /proc/[0-9]*/ns/net -maxdepth 0 -printf '%p %l\n' 2>/dev/null |
        awk -F'[/ ]' -v net="$net" '$NF == net { print $3 }'
}

crash() {
    local pid rest
    pid=$(holder "$1")
    rm "$FH/$1.pid"
    # The holder goes last: it tells which namespace is meant, to find what was forked meanwhile.
    while mapfile -t rest < <(mates "$pid" | grep -vx "$pid") && ((${#rest[@]})); do
        kill -9 "${rest[@]}" 2>/dev/null || true
    done
    kill -9 "$pid" 2>/dev/null || true
}

shape() {
    local file pid
    for file in "$FH"/h*.pid; do
        pid=$(<"$file")
        in_net "$pid" tc qdisc del dev eth0 root 2>/dev/null || true
        [[ $1 == off ]] || in_net "$pid" tc qdisc add dev eth0 root tbf rate "$1" burst 256kb latency 100ms
    done
}

up() {
    local switch pid i
    mkdir -p "$FH"
    {
        echo 127.0.0.1 localhost
        for ((i = 1; i <= $1; i++)); do echo "10.77.0.$i h$i"; done
    } >"$FH/hosts"
    if [[ -n ${FH_OWNER:-} ]]; then
        # shellcheck disable=SC2016
        setsid bash -c 'tail --pid="$FH_OWNER" -f /dev/null; rm "$FH/owner"; exec "$1" down' _ "$me" </dev/null >/dev/null 2>&1 &
        echo $! >"$FH/owner"
    fi
    hold switch "ip link set lo up; ip link add br0 type bridge; ip link set br0 up"
    switch=$(holder switch)
    for ((i = 1; i <= $1; i++)); do
        hold "h$i" "hostname h$i; mount --bind '$FH/hosts' /etc/hosts; mount -t tmpfs -o mode=1777 tmpfs /dev/shm
            ip link set lo up"
        pid=$(holder "h$i")
        in_net "$switch" ip link add "p$i" type veth peer name eth0 netns "$pid"
        in_net "$switch" ip link set "p$i" master br0 up
        in_net "$pid" ip addr add "10.77.0.$i/24" dev eth0
        in_net "$pid" ip link set eth0 up
    done
    [[ -z ${2:-} ]] || shape "$2"
}

down() {
    local file
    if [[ -e $FH/owner ]]; then
        kill -- "-$(<"$FH/owner")" 2>/dev/null || true
    fi
    for file in "$FH"/*.pid; do
        [[ ! -e $file ]] || crash "$(basename "$file" .pid)"
    done
    rm -rf "$FH"
}

case ${1:-} in
up) up "$2" "${3:-}" ;;
exec)
    pid=$(holder "$2")
    shift 2
    exec nsenter -t "$pid" --net --uts --ipc --mount --wd="$PWD" "$@"
    ;;
pids)
    pid=$(holder "$2")
    mates "$pid" | grep -vx "$pid" || true
    ;;
bytes)
    for file in "$FH"/h*.pid; do
        awk -v host="$(basename "$file" .pid)" '/eth0:/ { print host, "rx", $2, "tx", $10 }' "/proc/$(<"$file")/net/dev"
    done
    ;;
shape) shape "$2" ;;
cut) in_net "$(holder "$2")" ip link set eth0 down ;;
crash) crash "$2" ;;
down) down ;;
*)
    echo "usage: FH=FOLDER $0 up|exec|pids|bytes|shape|cut|crash|down ..., see the head of the file; got: $*" >&2
    exit 2
    ;;
esac
