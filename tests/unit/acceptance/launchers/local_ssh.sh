#!/bin/sh
# A stand-in for the ssh program: runs the remote command on this machine, with a state directory for each host.
# local_ssh.sh ROOT … -- HOST COMMAND. ROOT/down/HOST exists: the host cannot be reached; ROOT/cut/HOST: the connection
# breaks in the middle of the reply.
root=$1
while [ "$1" != -- ]; do shift; done
host=$2 command=$3
if [ -e "$root/down/$host" ]; then
    printf '*** Authorised use only ***\r\nssh: connect to host %s port 22: No route to host\r\n' "$host" >&2
    exit 255
fi
export XDG_STATE_HOME="$root/state/$host"
mkdir -p -m 700 "$root/state" "$XDG_STATE_HOME"
echo "Welcome to $host"
if [ -e "$root/cut/$host" ]; then
    sh -c "$command" | head -c -3
    exit 255
fi
exec sh -c "$command"
