#!/usr/bin/env bash
# Sets up (first run only) and trains:  bash scripts/train.sh [--section.key value ...]
# Without --job.config_file it runs train_configs/quickstart.toml.
#   NPROC   processes on this machine (default: its GPUs, or 1)
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
bash scripts/setup.sh

config=(--job.config_file train_configs/quickstart.toml)
for argument in "$@"; do
    case "$argument" in
        --job.config_file | --job.config_file=* | --job.config-file | --job.config-file=*) config=() ;;
        -h | --help) exec .venv/bin/python train.py --help ;;
    esac
done

gpus=0
if command -v nvidia-smi >/dev/null 2>&1; then
    gpus=$(nvidia-smi --list-gpus 2>/dev/null | grep -c '^GPU' || true)
fi
nproc=${NPROC:-$((gpus > 0 ? gpus : 1))}

# A mistake in the configuration is one line here; under torchrun every rank would tell it, with a traceback.
WORLD_SIZE=$nproc .venv/bin/python -m titanforge.config --check "${config[@]}" "$@"

# Without a value torchrun sets 1 thread per process, which wastes a CPU run of one process.
if [ "$gpus" = 0 ]; then
    cores=$(getconf _NPROCESSORS_ONLN)
    export OMP_NUM_THREADS=${OMP_NUM_THREADS:-$((cores > nproc ? cores / nproc : 1))}
fi
# After SIGTERM the ranks finish their step and save; torchrun's own patience is 30 seconds.
export TORCH_ELASTIC_SHUTDOWN_TIMEOUT=${TORCH_ELASTIC_SHUTDOWN_TIMEOUT:-120}
if [ "$nproc" = 1 ]; then
    # One process needs no launcher: its exit code comes through, and a stop ends without torchrun's traceback.
    unset RANK LOCAL_RANK WORLD_SIZE LOCAL_WORLD_SIZE
    exec .venv/bin/python train.py "${config[@]}" "$@"
fi
exec .venv/bin/torchrun --standalone --nproc_per_node="$nproc" train.py "${config[@]}" "$@"
