#!/usr/bin/env bash
# Towers and engines on one GPU, tables last:  benchmarks/vllm_gpu.sh OUT [TOWERS] [ENGINES]
#   OUT      folder for JSON and logs
#   TOWERS   attention backends, comma separated ("" for none); default FLASH_ATTN,TRITON_ATTN
#   ENGINES  steps of vllm_engine.py, comma separated ("" for none); default vl_v1
# vLLM and graphhal (installed, with its entry points) must be importable.
set -uo pipefail
here=$(cd "$(dirname "$0")" && pwd)
out=$1 towers=${2-FLASH_ATTN,TRITON_ATTN} engines=${3-vl_v1}
python=${PYTHON:-python3}
mkdir -p "$out"
status=0
for backend in ${towers//,/ }; do
    omni=; [ "$backend" = FLASH_ATTN ] && omni=--omni
    timeout -k 5 "${TOWER_SECONDS:-170}" "$python" "$here/vllm_towers.py" --backend "$backend" $omni \
        --out "$out/towers_$backend.json" >"$out/towers_$backend.txt" 2>"$out/towers_$backend.log" || {
        status=1
        tail -n 25 "$out/towers_$backend.log"
    }
    echo "# towers $backend at ${SECONDS} s"
done
if [ -n "$engines" ]; then
    "$python" "$here/vllm_engine.py" suite --steps "$engines" --out "$out/engine" \
        --speech "${SPEECH:-$here/speech}" >"$out/engine.txt" 2>&1 || status=1
    echo "# engines at ${SECONDS} s"
fi
for backend in ${towers//,/ }; do cat "$out/towers_$backend.txt" 2>/dev/null; done
cat "$out/engine.txt" 2>/dev/null
exit $status
