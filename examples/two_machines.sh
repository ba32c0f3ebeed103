#!/bin/sh
# Runs two_machines.py on two machines that are simulated by this one, which needs root and iproute2 (Linux):
#
#     sudo PYTHON=.venv/bin/python examples/two_machines.sh FOLDER [--steps 50]
#
# Each machine, node0 and node1, has its own network, processes, host name and shared memory (namespaces). A cable joins
# the two networks. The file system is the same, as FOLDER must be. Nothing is left of them at the end.
set -eu
[ $# -ge 1 ] || { echo "usage: $0 FOLDER [--steps 50]" >&2; exit 2; }
[ "$(id -u)" = 0 ] || { echo "$0: network namespaces need root: sudo $0 $*" >&2; exit 2; }
program=$(dirname "$0")/two_machines.py
PYTHON=${PYTHON:-python3}
mkdir -p "$1"
names=$(mktemp)
printf '127.0.0.1 localhost\n10.77.1.10 node0\n10.77.1.11 node1\n' > "$names"

remove() {
    for machine in "zeroshard-$$-0" "zeroshard-$$-1"; do
        ip netns pids "$machine" 2> /dev/null | xargs -r kill -9 || true
        ip netns del "$machine" 2> /dev/null || true
    done
    rm -f "$names"
}
trap remove EXIT
trap 'exit 1' INT TERM

ip netns add "zeroshard-$$-0"
ip netns add "zeroshard-$$-1"
ip link add eth0 netns "zeroshard-$$-0" type veth peer name eth0 netns "zeroshard-$$-1"
for number in 0 1; do
    ip -n "zeroshard-$$-$number" link set lo up
    ip -n "zeroshard-$$-$number" addr add "10.77.1.1$number/24" dev eth0
    ip -n "zeroshard-$$-$number" link set eth0 up
done

# on NUMBER COMMAND...: run a command on a machine.
on() {
    number=$1
    shift
    ip netns exec "zeroshard-$$-$number" unshare --mount --uts --ipc --pid --fork --kill-child sh -euc '
        mount -t proc proc /proc
        mount -t tmpfs tmpfs /dev/shm
        mount --bind "$1" /etc/hosts
        hostname "$2"
        shift 2
        exec "$@"' sh "$names" "node$number" "$@"
}

# torchrun_on NUMBER ARGUMENTS...: what a person would type on that machine.
torchrun_on() {
    number=$1
    shift
    on "$number" "$PYTHON" -m torch.distributed.run --nnodes 2 --nproc-per-node 1 \
        --rdzv-backend c10d --rdzv-endpoint node0:29500 "$program" "$@"
}

torchrun_on 1 "$@" &
torchrun_on 0 "$@"
wait $!
