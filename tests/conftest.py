import os
import sys
from pathlib import Path

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("OMP_NUM_THREADS", "1")  # tiny models: a second thread only spins
sys.path.insert(0, str(Path(__file__).parent))

import torch

torch.set_num_threads(1)
