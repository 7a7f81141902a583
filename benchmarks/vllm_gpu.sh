#!/usr/bin/env bash
# Towers and engines on one GPU, tables last:  benchmarks/vllm_gpu.sh OUT [TOWERS] [ENGINES]
#   OUT      folder for JSON and logs
#   TOWERS   attention backends, comma separated ("" for none); default FLASH_ATTN,TRITON_ATTN
#   ENGINES  steps of vllm_engine.py, comma separated ("" for none); default vl_v1
# TOWER_MODELS: vl (default), omni, or both; TOWER_SECONDS: for one table (150).
# ENGINE_OPTIONS: further options of vllm_engine.py suite. SPEECH: folder with .wav files.
# vLLM and graphhal (installed, with its entry points) must be importable.
set -uo pipefail
here=$(cd "$(dirname "$0")" && pwd)
out=$1 towers=${2-FLASH_ATTN,TRITON_ATTN} engines=${3-vl_v1}
python=${PYTHON:-python3} seconds=${TOWER_SECONDS:-150} models=${TOWER_MODELS:-vl}
mkdir -p "$out"
status=0
names=()
for model in ${models//,/ }; do
    for backend in ${towers//,/ }; do
        name=towers_${model}_$backend
        names+=("$name")
        sizes=()
        # Its attention is several times slower at large groups: start-up alone took 50 s there.
        [ "$backend" = TRITON_ATTN ] && sizes=(--images 1,2,4 --sides 7,14,28)
        # No group starts in the last ten seconds, so the tables are printed in time.
        timeout -k 5 $((seconds + 30)) "$python" "$here/vllm_towers.py" --model "$model" \
            --backend "$backend" --seconds $((seconds - 10)) ${sizes[@]+"${sizes[@]}"} \
            --out "$out/$name.json" \
            >"$out/$name.txt" 2>"$out/$name.log" || {
            status=1
            tail -n 25 "$out/$name.log"
        }
        echo "# $name at ${SECONDS} s"
    done
done
if [ -n "$engines" ]; then
    # shellcheck disable=SC2086
    "$python" "$here/vllm_engine.py" suite --steps "$engines" --out "$out/engine" \
        --speech "${SPEECH:-$here/speech}" ${ENGINE_OPTIONS:-} >"$out/engine.txt" 2>&1 || status=1
    echo "# engines at ${SECONDS} s"
fi
for name in ${names[@]+"${names[@]}"}; do cat "$out/$name.txt"; done
if [ -n "$engines" ]; then cat "$out/engine.txt"; fi
exit $status
