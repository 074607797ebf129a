"""Megatron-Bridge's arm of convert_bench.py: megatron_bridge_arm.py HF MEGATRON EXPORTED. Its own conversion of a Hugging Face folder on a host
without a GPU (bridge_models.py says with what), saved by megatron-core, and exported again. Prints the seconds of each as JSON."""
import json
import os
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "interop/convert/families"))


def main(source, target, exported):
    from bridge_models import begin, empty_model
    begin()
    bridge, model = empty_model(source)
    from megatron.core import dist_checkpointing
    seconds, started = {}, time.monotonic()

    def lap(name):
        nonlocal started
        os.sync()
        seconds[name], started = time.monotonic() - started, time.monotonic()

    bridge.load_hf_weights([model])
    lap("load")
    os.makedirs(target)
    dist_checkpointing.save(model.sharded_state_dict(), target)
    lap("save")
    if "quantization_config" not in json.loads(Path(source, "config.json").read_text()):  # it exports to the source's names alone
        bridge.save_hf_weights([model], exported, show_progress=False)
        lap("export")
    return seconds


if __name__ == "__main__":  # saving starts processes that import this file again
    stdout, sys.stdout = sys.stdout, sys.stderr  # Megatron-Bridge prints
    json.dump(main(*sys.argv[1:4]), stdout)
