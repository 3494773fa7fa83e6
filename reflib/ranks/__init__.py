"""Programs that communicate: several processes (ranks) that run the same program on parts of the data.

``collectives``: functional collectives as calls that are started early and waited for late, in one order on all ranks.
``meeting``: each rank says something, all hear what follows. ``agree``: so the order is compared before it is used.
``tune``, ``child``: choosing between implementations of an op that communicates. ``swap``: a tuned graph comes in at
the same call on all ranks.
``symmetric``, ``reduce``, ``kernels``: memory that all ranks read, and all-reduces over it. ``place``: buffers of
programs are planned into it.
``candidates``: ops that communicate, with these and others as candidates.
``share``, ``simulate``: other choices are measured by one rank for all; the same with a thousand simulated ranks.
"""
