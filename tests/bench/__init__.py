"""The speed that reflib promises, measured with its peers beside it in the same run.

    python -m tests.bench cpu|gpu [--only SECTION,...] [--out FILE.json] [--quick] [--budget SECONDS]

cases.py     what is computed: pointwise chains, softmax, norms, small calls, models
child.py     what runs in a process of its own; children.py starts it and reads its rows
worker.py    kernels and memory: check each contender, then time them in turn
compiling.py compile time: every run in a fresh process with fresh caches
quiet.py     whether somebody else uses the device meanwhile
matmul*.py   the matmul sets: TorchInductor's tuning in children first, then timing alone
report.py    rows to tables, rows to promises kept or not
"""
