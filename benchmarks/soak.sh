#!/usr/bin/env bash
# Half an hour of load on a server process, over HTTP: bash benchmarks/soak.sh OUT
# Clients vanish, malformed requests come between, an adapter is loaded and unloaded all the time. Serves random weights:
#   SHAPE=8b DTYPE=bfloat16   of the model, with 64 adapters of rank 8; DTYPE=float32 demands the very answers of the
#                             same requests alone
#   RATE=20 SOAK_MINUTES=30   requests/s, and for how long
#   PORT=8017                 of the server
#   SOAK_DIR=FOLDER           new or empty, for the weights (16 GB of 8b); removed at the end (default: a temporary one)
# Writes OUT/soak.json (once a minute, what is known so far) and OUT/soak-server.log (in the end, its last 200 lines).
set -uo pipefail
out=${1:?usage: benchmarks/soak.sh OUT}
shape=${SHAPE:-8b} dtype=${DTYPE:-bfloat16} port=${PORT:-8017}
drain_s=5 start_limit_s=600 stop_limit_s=15
log=$out/soak-server.log
url=http://127.0.0.1:$port
server='' client=''
export no_proxy=127.0.0.1
mkdir -p "$out"

fail() { printf 'error: %s\n' "$*" >&2; exit 1; }

clean_up() {
  local pid
  for pid in $client $server; do
    kill -KILL "$pid" && wait "$pid"
  done 2>/dev/null
  rm -rf "${dir:?}"
  [ ! -f "$log" ] || { tail -n 200 "$log" >"$log.tail" && mv "$log.tail" "$log"; }
}

is_healthy() { python3 -c 'import sys, urllib.request as r; r.urlopen(sys.argv[1], timeout=5)' "$url/health" 2>/dev/null; }

# A field of the model's config.json.
model_field() { python3 -c 'import json, sys; print(json.load(open(sys.argv[1]))[sys.argv[2]])' "$dir/model/config.json" "$1"; }

if is_healthy; then fail "another server answers on port $port; give a free one in PORT"; fi
dir=${SOAK_DIR:-$(mktemp -d)}
if [ -e "$dir" ] && [ -n "$(ls -A "$dir")" ]; then fail "SOAK_DIR $dir is not empty; it would be removed at the end"; fi
trap clean_up EXIT
trap 'exit 130' INT TERM
JAX_PLATFORMS=cpu python3 -m serving.bench.random_folder --shape "$shape" --dtype "$dtype" --adapters 64 --rank 8 --out "$dir" ||
  fail "the model could not be written"
max_len=$(model_field max_position_embeddings) || fail "the model has no config"
max_len=$((max_len < 2048 ? max_len : 2048))

XLA_PYTHON_CLIENT_MEM_FRACTION=${XLA_PYTHON_CLIENT_MEM_FRACTION:-0.9} python3 -m dymerge_jax.serve \
  --model "$dir/model" --adapters "$dir/adapters" --adapter-root "$dir/churn" --dtype "$dtype" --port "$port" \
  --adapter-slots 64 --slot-rank 8 --max-num-seqs 32 --max-model-len "$max_len" --drain-s "$drain_s" >"$log" 2>&1 &
server=$!
start_s=$SECONDS
until is_healthy; do
  kill -0 "$server" 2>/dev/null || { tail -n 20 "$log" >&2; fail "the server ended before it served; see $log"; }
  ((SECONDS - start_s < start_limit_s)) || fail "the server did not serve within $start_limit_s s; see $log"
  sleep 1
done
echo "the server served after $((SECONDS - start_s)) s"

exact=()
[ "$dtype" != float32 ] || exact=(--exact-outputs)
JAX_PLATFORMS=cpu python3 -m serving.bench --url "$url" --workloads skewed --rates "${RATE:-20}" \
  --longest $((max_len / 2)) --vocab "$(model_field vocab_size)" --soak-minutes "${SOAK_MINUTES:-30}" \
  --server-pid "$server" --churn-adapter "$dir/churn/soak-churn" "${exact[@]}" --out "$out/soak.json" &
client=$!
wait -n "$client" "$server"  # in the background, so that a signal to this script ends all of it at once
status=$?
kill -0 "$server" 2>/dev/null || fail "the server ended with status $status before it was stopped; see $log"
client=''

stop_s=$SECONDS
kill -INT "$server"
while kill -0 "$server" 2>/dev/null; do
  ((SECONDS - stop_s < stop_limit_s)) || fail "the server had not ended $stop_limit_s s after SIGINT; see $log"
  sleep 0.2
done
wait "$server"
server_status=$?
server=''
echo "the server ended with status $server_status, $((SECONDS - stop_s)) s after SIGINT"
((server_status == 0)) || fail "the server ended with status $server_status, expected 0; see $log"
exit $status
