#!/bin/bash
# Renews the image's pins: `image/lock.sh [--upgrade]`. Needs uv and npm.
#
# Locks name no index, so that they work from whichever one a host is set up for,
# and hold the hashes of every platform's wheels.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")"

for list in guest runtimes user jupyter; do
    kernel_only=()
    if [[ $list == jupyter ]]; then
        kernel_only=(--no-emit-package jedi --no-emit-package parso --no-emit-package debugpy)
    fi
    uv pip compile "$@" --quiet --universal --python-version 3.13 --generate-hashes \
        --no-header --no-annotate --no-emit-index-url --no-emit-find-links \
        "${kernel_only[@]}" --output-file "requirements/$list.txt" "requirements/$list.in"
done

cd npm
rm -f package-lock.json
npm install --package-lock-only --ignore-scripts --omit-lockfile-registry-resolved
