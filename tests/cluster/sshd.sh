#!/usr/bin/env bash
# A real sshd in every fake host of hosts.sh (its FH says which), with a key made for them; nothing of the user's own ssh
# is read or written. Reach them with `ssh -F $FH/ssh_config h1 ...`, from inside a host. They end with their hosts.
set -euo pipefail
: "${FH:?names no folder of fake hosts}"
hosts=$(dirname "$(readlink -f "$0")")/hosts.sh

ssh-keygen -q -t ed25519 -N '' -f "$FH/user_key"
ssh-keygen -q -t ed25519 -N '' -f "$FH/host_key"
cp "$FH/user_key.pub" "$FH/authorized_keys"
cat >"$FH/sshd_config" <<CONFIG
Port 22
HostKey $FH/host_key
AuthorizedKeysFile $FH/authorized_keys
StrictModes no
UsePAM no
PasswordAuthentication no
PermitRootLogin prohibit-password
PidFile none
# A job's ranks may all be reached at once.
MaxStartups 100
CONFIG
cat >"$FH/ssh_config" <<CONFIG
Host *
  IdentityFile $FH/user_key
  IdentitiesOnly yes
  UserKnownHostsFile /dev/null
  GlobalKnownHostsFile /dev/null
  StrictHostKeyChecking no
  LogLevel ERROR
CONFIG

for file in "$FH"/h*.pid; do
    # sshd wants a folder that is made at boot; this one is the host's own.
    # shellcheck disable=SC2016
    "$hosts" exec "$(basename "$file" .pid)" bash -euc \
        'mount -t tmpfs tmpfs /run; mkdir /run/sshd; exec "$(command -v sshd || echo /usr/sbin/sshd)" -f "$1"' _ "$FH/sshd_config"
done
