#!/bin/sh
# Exit 0 while what runs in this container works, else 1 and a sentence. A node writes its metrics at least every ten seconds, also
# while it waits; a bootstrap node writes none, and has its network daemon alone.
minutes=${HEALTH_MINUTES:-2}
if [ -n "$(find /data -name metrics.jsonl -print -quit 2>/dev/null)" ] \
    && [ -z "$(find /data -name metrics.jsonl -mmin "-$minutes" -print -quit)" ]; then
    echo "the node has written no metrics for $minutes minutes: see its log, and start it again with --resume"
    exit 1
fi
# Of this user alone: some tools that run images show all processes of the machine.
find /proc -maxdepth 1 -name '[0-9]*' -user "$(id -u)" -exec cat {}/comm \; 2>/dev/null | grep -qx p2pd || {
    echo "the network daemon does not run: see the log, and start the container again"
    exit 1
}
