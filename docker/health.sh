#!/bin/sh
# shoal-health [FOLDER]: exit 0 while what runs in this container works, else 1 and a sentence. FOLDER is that of a node; without it, the
# nodes are those below /data. A node writes its metrics at least every ten seconds, also while it waits, and notes when nothing moves;
# a bootstrap node and a page write none, and have their network daemon alone.
minutes=${HEALTH_MINUTES:-2}
folder=${1:-/data}
if [ -n "$(find "$folder" -name metrics.jsonl -print -quit 2>/dev/null)" ]; then
    if [ -z "$(find "$folder" -name metrics.jsonl -mmin "-$minutes" -print -quit)" ]; then
        echo "the node has written no metrics for $minutes minutes: see its log, and start it again with --resume"
        exit 1
    fi
    # A line each ten seconds: that nothing moves in any of them is a thread that hangs, unless it waits for peers to come.
    lines=$((6 * minutes))
    if [ -z "$(find "$folder" -name metrics.jsonl -mmin "-$minutes" -exec sh -c 'tail -n "$0" "$1" | awk -v lines="$0" "
            ! /\"event\": \"activity\"/ || /\"alive\": true/ || /\"doing\": \"waiting for peers\"/ { moves = 1 }
            END { exit ! (moves || NR < lines) }"' "$lines" {} \; -print -quit)" ]; then
        echo "nothing has moved in the node for $minutes minutes: see its log, and start it again with --resume"
        exit 1
    fi
fi
# Of this user alone: some tools that run images show all processes of the machine.
find /proc -maxdepth 1 -name '[0-9]*' -user "$(id -u)" -exec cat {}/comm \; 2>/dev/null | grep -qx p2pd || {
    echo "the network daemon does not run: see the log, and start the container again"
    exit 1
}
