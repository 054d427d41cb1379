"""One thread a process: on few cores, more make small tensors slower, and a busy machine much slower."""

import torch

torch.set_num_threads(1)
