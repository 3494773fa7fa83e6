"""Loops to source text: Triton for GPUs, C++ for CPUs. Strings are made here and in wrap/ only."""
