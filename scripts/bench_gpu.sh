#!/usr/bin/env bash
# What docs/benchmarks.md lacks: a machine with an NVIDIA GPU, under 5 minutes. Needs the extra `cuda`, scripts/peers.txt
# and flash-attn-res. Parity is the column `error`: output and gradients against the formula in float64.
set -euo pipefail
cd "$(dirname "$0")/.."
out=${1:-build/bench_gpu}
mkdir -p "$out"
sizes=(--device cuda --layers 24 --dim 1024 --heads 16 --tokens 2048 --batch 4 --vocab 32768 --dtype bf16 --rounds 7)
cases=(full block block:depth_backend=fla block:depth_backend=eager block:two_phase=true,depth_backend=eager mhc)
for dtype in fp32 bf16; do
    timeout 60 python scripts/bench_op.py --device cuda --sources 9 --shape 4 2048 1024 --dtype "$dtype" --inductor --peers \
        --json "$out/op_$dtype.json"
done
timeout 80 python scripts/bench_step.py "${sizes[@]}" --cases "${cases[@]}" --json "$out/step.json"
timeout 100 python scripts/bench_step.py "${sizes[@]}" --cases block block:depth_backend=fla --compile model \
    --json "$out/step_compiled.json"
