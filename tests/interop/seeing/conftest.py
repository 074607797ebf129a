import sys
from pathlib import Path

sys.path.append(str(Path(__file__).parent.parent / "train"))  # ppo_run, sft_run
