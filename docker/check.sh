#!/usr/bin/env bash
# Builds the image of the Dockerfile without a Docker engine and without an image from a registry, runs a demo in it, and looks at its
# health check and its size: buildah builds on a base that debootstrap makes from Debian's packages. Needs root, buildah, debootstrap and a package index of Python.
#
#   sudo docker/check.sh
#   sudo PIP_ARGS="--find-links /opt/wheels" VOLUME=/opt/wheels docker/check.sh      # wheels that are on this machine
#
# MIRROR names a mirror of Debian; VOLUME a folder that pip may read in the build; MOST_MB the
# largest size. Nothing is left behind.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
exec </dev/null

work=$(mktemp -d)
export STORAGE_DRIVER=vfs BUILDAH_ISOLATION=chroot  # both work inside a container too
store=(--root "$work/store" --runroot "$work/run")
end() {
    buildah "${store[@]}" rm --all >/dev/null 2>&1 || true
    buildah "${store[@]}" rmi --all --force >/dev/null 2>&1 || true
    rm -rf --one-file-system "$work"
}
trap end EXIT
step() { printf '\n== %s (at %d s)\n' "$1" "$SECONDS"; }

step "base: Debian with Python"
timeout 900 debootstrap --variant=minbase --include=python3,python3-pip,python3-venv,ca-certificates bookworm "$work/base" \
    ${MIRROR:+"$MIRROR"} >"$work/log" || { tail -n 20 "$work/log"; exit 1; }
# As in the image of Python that the Dockerfile names: pip installs for the system. Certificates are those of this machine.
rm -f "$work"/base/usr/lib/python3*/EXTERNALLY-MANAGED
rm -rf "$work"/base/var/cache/apt/* "$work"/base/var/lib/apt/lists/*  # of no use in an image
cp -L /etc/ssl/certs/ca-certificates.crt "$work/base/etc/ssl/certs/ca-certificates.crt"
base=$(buildah "${store[@]}" from scratch)
buildah "${store[@]}" copy --quiet "$base" "$work/base" / >/dev/null
buildah "${store[@]}" config --env PIP_CERT=/etc/ssl/certs/ca-certificates.crt "$base"
buildah "${store[@]}" commit --quiet --rm "$base" localhost/python >/dev/null
rm -rf --one-file-system "$work/base"

step "image"
timeout 1800 buildah "${store[@]}" build --quiet --format docker --pull-never --tag shoal --build-arg BASE=localhost/python \
    --build-arg PIP_ARGS="${PIP_ARGS:-}" ${VOLUME:+--volume "$VOLUME:$VOLUME:ro"} .
node=$(buildah "${store[@]}" from --pull-never localhost/shoal)
inside() { timeout 600 buildah "${store[@]}" run "$node" -- "$@"; }

step "check"
[ "$(inside id -u)" = 1000 ] || { echo "the image does not run as a user of its own" >&2; exit 1; }
[ "$(buildah "${store[@]}" inspect --type image --format '{{.OCIv1.Config.Entrypoint}} {{.OCIv1.Config.Cmd}}' localhost/shoal)" \
    = "[shoal] [--help]" ] || { echo "the image does not run shoal" >&2; exit 1; }
inside shoal id new --identity /data/node.key
inside shoal demo --peers 2 --rounds 2 --every 5 --no-compare

step "health: of nothing, of a node that is watched, of a node that was killed"
inside sh -c '
    if shoal-health; then echo "healthy without a node" >&2; exit 1; fi
    shoal up --steps 1000000 --folder /data/runs/checked &
    node=$! tries=0
    until [ -e /data/runs/checked/link.json ] && shoal-health; do
        tries=$((tries + 1))
        if [ "$tries" -gt 120 ]; then echo "a node is not healthy after 120 s" >&2; exit 1; fi
        sleep 1
    done
    shoal watch "$(shoal link --folder /data/runs/checked)" --json --seconds 20 >/data/events
    grep -q "\"event\": \"status\"" /data/events || { echo "a node is not watched" >&2; exit 1; }
    python3 -c "import aiohttp, segno, textual" # of the page and the terminal view
    kill -KILL "$node"  # its daemon ends with it
    tries=0
    while shoal-health; do
        tries=$((tries + 1))
        if [ "$tries" -gt 240 ]; then echo "a node that was killed is healthy" >&2; exit 1; fi
        sleep 1
    done'

step "size"
buildah "${store[@]}" rm "$node" >/dev/null
bare=$(buildah "${store[@]}" from --pull-never localhost/shoal)
bytes=$(du -sb "$(buildah "${store[@]}" mount "$bare")" | cut -f1)
echo "$((bytes / 1000000)) MB of files in the image; at most ${MOST_MB:-1200}"
[ "$bytes" -le "$((${MOST_MB:-1200} * 1000000))" ] || { echo "the image is larger than ${MOST_MB:-1200} MB" >&2; exit 1; }

step "done"
