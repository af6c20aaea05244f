#!/bin/bash
# A TPU VM of 32 v5p chips (eight hosts): install on all workers, and start as a service that outlives the terminal.
# devices: 32
# WHEEL=dist/jaxrl_llm-VERSION.whl BUCKET=name SLICE=name ZONE=zone bash tpu_vm.sh
set -euo pipefail
: "${WHEEL:?}" "${BUCKET:?}" "${SLICE:?}" "${ZONE:?}"

on_all() { gcloud compute tpus tpu-vm ssh "$SLICE" --zone="$ZONE" --worker=all --command="$1"; }

# gcloud compute tpus tpu-vm create "$SLICE" --zone="$ZONE" --accelerator-type=v5p-64 --version=v2-alpha-tpuv5 --spot
gcloud compute tpus tpu-vm scp "$WHEEL" "$SLICE:" --zone="$ZONE" --worker=all
# uv brings a Python of its own: the image's may be older than 3.11.
on_all "python3 -m pip install --user --quiet uv && python3 -m uv venv --python=3.12 ~/venv \
  && python3 -m uv pip install --python=\$HOME/venv \"\$(ls ~/jaxrl_llm-*.whl)[tpu,gcs,hf]\""
# Each host reads its own copy of the checkpoint and of the data.
on_all "mkdir -p ~/data && gcloud storage cp -r gs://$BUCKET/Qwen3-30B-A3B ~/ && gcloud storage rsync -r gs://$BUCKET/data ~/data"

# systemd keeps the run when the terminal ends. When the machine is taken back, or by `systemctl stop run`, it sends
# SIGTERM to the run alone (KillMode=mixed: not to its verifiers), which then finishes its step and saves.
on_all "sudo systemd-run --unit=run --uid=\$(id -u) --working-directory=\$HOME \
  --property=KillMode=mixed --property=TimeoutStopSec=600 --property=Environment=HOME=\$HOME \
  \$HOME/venv/bin/python -m jaxrl_llm.main --config qwen3_30b_a3b_gsm8k_gspo --workdir \$HOME/run \
  --checkpoints gs://$BUCKET/run --config.task.data_dir=\$HOME/data \
  --config.model.pretrained=\$HOME/Qwen3-30B-A3B --config.mesh.shape='(1,-1,4,1)'"

# What it prints: gcloud compute tpus tpu-vm ssh "$SLICE" --zone="$ZONE" --worker=0 --command="journalctl -fu run"
