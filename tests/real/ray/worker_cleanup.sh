#!/bin/sh
# The script that gpukeeper replaces on Ray hosts, as it ran from cron:
#   0 * * * * root THRESHOLD_MB=5000 CPU_PERCENT=5 FOLDER=/tmp /usr/local/bin/ray-worker-cleanup
set -eu
: "${DOCKER_HOST:?names the engine of a test}"
for worker in $(docker ps --filter name=ray-worker --format '{{.Names}}'); do
    size=$(docker exec "$worker" python3 -c "$SIZE_MB" "$FOLDER" </dev/null)
    cpu=$(docker stats --no-stream --format '{{.CPUPerc}}' "$worker")
    if [ "$size" -gt "$THRESHOLD_MB" ] && [ "${cpu%%.*}" -lt "$CPU_PERCENT" ]; then
        docker exec "$worker" sh -c "rm -rf $FOLDER/ray_tmp_* $FOLDER/pip-* $FOLDER/tmp*" </dev/null
    fi
done
docker system prune --force --volumes
