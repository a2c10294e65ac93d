"""The engine on a simulated device with streams, without a GPU: a timeline, checkers of races and of captures.

    python -m tests.simulation [--only TEXT]      the timeline
    pytest tests/simulation                       all of it

`device.py` (with `device.cpp`, which it compiles at first use) is the device: `torch.device("sim")`, whose kernels run
on the CPU and report which memory they access, on which stream. Stock's engine and ours run on it unchanged;
`training.py` defines a scenario, `model.py` the model that it trains.

The timeline (`timeline.py`) gives streams and communicators clocks. `scenarios.py` has the scenarios to compare, with
their costs; add a row there. A row has forward+backward of stock's first and later step, then ours. In "copies" memory
has 3 TB/s and links have 400 GB/s.

The checker (`races.py`) keeps vector clocks; `configurations.py` has the programs that it runs, `faults.py` the faults
that it must find. `threads.py` has the thread that overlapped steps run on, for both.

`capture.py` has the rules of CUDA graphs: it captures a step, replays it and compares with eager steps.
"""

import os

os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")  # c10d warns of each `fake` group that is destroyed
