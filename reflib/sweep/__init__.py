"""The model sweep: many models, inference and training, each beside eager and TorchInductor: `reflib sweep`.

    model.py     what a model of the sweep is
    registry.py  those of transformers, torchvision and timm; the list of all
    own.py       our own: U-Net, LSTM, graph networks, mixture of experts, state space, ...
    child.py     one step of a model, by a compiler, in a process of its own
    run.py       jobs -> processes -> rows, stored as they come
    report.py    rows -> geometric means and tables, the worst first

Compiling takes long and needs a core; timing is short and needs the device alone. So several processes compile at once
(`--workers`), and a lock lets one use the device at a time. Steps that take longest to compile begin first.

On one GPU with 16 cores, every model in bfloat16 (255 measurements) takes about 14 minutes, which are the device's: 4
seconds per measurement, half of them for the reference in float64::

    reflib sweep --device cuda --dtype bfloat16 --workers 8 --limit 150 --seconds 530 --out runs/sweep

`--seconds` ends a call on time; whatever is left is measured by the same command again. For the book, copy
`sweep.<gpu>.json` from that folder to `notebooks/recorded/`.
"""

from reflib.sweep.model import Model

__all__ = ["Model"]
