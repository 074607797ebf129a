#!/bin/bash
# Runs two builds of ferry by turns on the same work on the host: tests/bench/compare_builds.sh OLD NEW FOLDER [ROUNDS]
# OLD and NEW are programs, FOLDER is in memory (4 GB); build/peers has the Python. A line for each run: what, build, seconds (generate: tokens/s).
set -euo pipefail
old=$(realpath "$1") new=$(realpath "$2") folder=$3 rounds=${4:-6}
root=$(realpath "$(dirname "$0")/../..")
source "$root/build/peers/env.sh"
rm -rf "$folder"
mkdir -p "$folder"
cd "$folder"
"$root/build/peers/bin/python" "$root/tests/bench/make_checkpoint.py" qwen2.5-0.5b hf > /dev/null
cp "$root"/docs/examples/sorting/*.toml .
python3 "$root/docs/examples/sorting/make_task.py" task --seed 1 > /dev/null

seconds() {
  local start
  start=$(date +%s.%N)
  "$@" > log 2>&1 || { cat log; exit 1; }
  echo "$(date +%s.%N) - $start" | bc
}
rate() {
  "$@" --prompt-ids 1,2,3,4,5,6,7,8 --max-tokens 32 --ignore-eos --json 2>&1 > /dev/null | grep -oE '[0-9.]+ tokens/s' | head -1
}

"$old" train sft --config sft.toml trainer.default_local_dir=lesson > log 2>&1
for ((round = 0; round < rounds; ++round)); do
  for build in old new; do
    program=${!build}
    rm -rf megatron back sft grpo
    echo "convert $build $(seconds "$program" convert hf megatron --tp 2 --pp 2)"
    echo "back $build $(seconds "$program" convert megatron back)"
    echo "digest $build $(seconds "$program" digest hf)"
    echo "generate-1 $build $(rate "$program" generate hf)"
    echo "generate-16 $build $(rate "$program" generate hf --n 16)"
    echo "sft $build $(seconds "$program" train sft --config sft.toml trainer.total_training_steps=60)"
    echo "grpo $build $(seconds "$program" train grpo --config grpo.toml actor_rollout_ref.model.path=lesson/hf_model trainer.total_training_steps=10)"
  done
done
rm -rf "$folder"
