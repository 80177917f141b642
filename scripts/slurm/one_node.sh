#!/bin/bash
# A Slurm cluster of this one machine, to try job scripts: Debian's slurm-wlm and munge, root, no systemd.
#     apt-get install -y slurm-wlm munge
#     scripts/slurm/one_node.sh start DIR     starts munged, slurmctld and slurmd; everything they write is in DIR
#     export SLURM_CONF=DIR/slurm.conf; sbatch ...; squeue
#     scripts/slurm/one_node.sh stop DIR      ends the daemons that start started, and nothing else
set -euo pipefail
[ $# = 2 ] || { sed -n '2,6s/^# \{0,1\}//p' "$0" >&2; exit 2; }
[ "$(id -u)" = 0 ] || { echo "one_node.sh: run it as root: the daemons change users" >&2; exit 2; }
for program in munged slurmctld slurmd; do
    command -v "$program" >/dev/null || { echo "one_node.sh: $program is missing: apt-get install -y slurm-wlm munge" >&2; exit 2; }
done

configuration() {
    cat <<END
ClusterName=here
FirstJobId=$((RANDOM + 1))
SlurmctldHost=$(hostname -s)(127.0.0.1)
SlurmctldPort=$PORT
SlurmdPort=$((PORT + 1))
SlurmUser=root
AuthType=auth/munge
AuthInfo=socket=$DIR/munge.socket
StateSaveLocation=$DIR/state
SlurmdSpoolDir=$DIR/spool
SlurmctldPidFile=$DIR/slurmctld.pid
SlurmdPidFile=$DIR/slurmd.pid
SlurmctldLogFile=$DIR/slurmctld.log
SlurmdLogFile=$DIR/slurmd.log
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
MpiDefault=pmi2
JobRequeue=1
ReturnToService=2
SchedulerParameters=bf_interval=1,sched_min_interval=0
NodeName=$(hostname -s) NodeAddr=127.0.0.1 CPUs=$(nproc) State=UNKNOWN
PartitionName=here Nodes=ALL Default=YES MaxTime=INFINITE State=UP
END
}

start() {
    mkdir -p "$DIR"/{state,spool}
    (umask 077; [ -e "$DIR/munge.key" ] || dd if=/dev/urandom of="$DIR/munge.key" bs=1024 count=1 status=none)
    configuration >"$DIR/slurm.conf"
    export SLURM_CONF=$DIR/slurm.conf
    munged --force --key-file="$DIR/munge.key" --socket="$DIR/munge.socket" --pid-file="$DIR/munged.pid" \
        --log-file="$DIR/munged.log" --seed-file="$DIR/munge.seed" --num-threads=1
    slurmctld -c
    slurmd
    for _ in $(seq 300); do
        [ "$(sinfo -h -o %T 2>/dev/null)" = idle ] && return
        sleep 0.2
    done
    echo "one_node.sh: the node is not idle after a minute: see $DIR/slurmctld.log and $DIR/slurmd.log" >&2
    return 1
}

stop() {
    local daemon pid
    export SLURM_CONF=$DIR/slurm.conf
    timeout 5 scancel --user=root 2>/dev/null || true  # jobs end while their slurmctld is there to be told
    for _ in $(seq 50); do
        [ -z "$(timeout 5 squeue -h 2>/dev/null)" ] && break
        sleep 0.2
    done
    for daemon in slurmd slurmctld munged; do
        [ -s "$DIR/$daemon.pid" ] || continue
        pid=$(<"$DIR/$daemon.pid")
        kill "$pid" 2>/dev/null || continue
        for _ in $(seq 50); do  # slurmd waits for the ends of jobs that never come once slurmctld is gone
            kill -0 "$pid" 2>/dev/null || continue 2
            sleep 0.1
        done
        kill -KILL "$pid" 2>/dev/null || true
    done
}

mkdir -p "$2"
DIR=$(realpath "$2")
PORT=${SLURM_TEST_PORT:-26817}
case $1 in
    start) start ;;
    stop) stop ;;
    *) echo "one_node.sh: $1 is unknown: pass start or stop" >&2; exit 2 ;;
esac
