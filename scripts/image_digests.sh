#!/usr/bin/env bash
# Says whether the digest of each base image is that which its tag has now. Needs docker with buildx, and the network.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

status=0
for file in docker/Dockerfile docker/Dockerfile.cpu; do
    pinned=$(awk '$1 == "FROM" {print $2; exit}' "$file")
    now=$(docker buildx imagetools inspect --format '{{json .Manifest.Digest}}' "${pinned%@*}" | tr -d '"')
    if [[ "${pinned#*@}" == "$now" ]]; then
        echo "$file: ${pinned%@*} is $now"
    else
        echo "$file: ${pinned%@*} is $now now, pinned is ${pinned#*@}"
        status=1
    fi
done
exit "$status"
