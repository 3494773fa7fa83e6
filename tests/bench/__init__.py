"""The speed that reflib promises, measured with its peers beside it in the same run.

    python -m tests.bench cpu|gpu [--only SECTION,...] [--out FILE.json] [--quick] [--budget SECONDS]

child.py     what runs in a process of its own; children.py starts it and reads its rows
host.py      what a call costs on the host; building the wrapper
package.py   packages: building, loading, calling, size
quiet.py     whether another process uses the device meanwhile
refilling.py notebook cells that show recorded rows, executed again without a GPU
matmul*.py   the matmul sets: TorchInductor's tuning in children first, then timing alone
report.py    rows to tables, rows to promises kept or not

Kernels, compile time and peak memory are the sweep's (`reflib sweep`): of models, and of what functions.py, unseen.py
and flex.py list.
"""
