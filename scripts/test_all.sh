#!/usr/bin/env bash
# `hatch run test-all`: every test, and some random programs. Runs every part, and fails if one has failed.
# Arguments go to pytest in the first part.
set -uo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

failed=()
part() {
  printf '\n=== %s\n' "$*"
  "$@" || failed+=("$*")
}

part pytest "$@"
part hatch run trainers:test-all
part python -m tests.core.random_programs --count 200

if ((${#failed[@]})); then
  printf 'failed: %s\n' "${failed[@]}" >&2
  exit 1
fi
