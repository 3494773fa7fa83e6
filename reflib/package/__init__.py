"""Packages: a compiled model in one file that runs where there is no compiler, on GPUs of several generations.

``aot_compile`` captures a model once for each kind of device (``capture/export.py``; the GPU need not be there), and
takes the graph through fuse, choose, plan and generate once for each architecture: a tiling that is right for Hopper
does not fit into an RTX 4090's shared memory, and a different split means different kernels. So what a package holds is
one *arm* for each architecture: a wrapper in C++, printed and compiled as ``wrapper="cpp"`` does it, and the machine
code of its kernels. One arm more is assembly text (PTX, of the sm_80 program) that drivers of later GPUs compile
themselves. Arms share the weights, which are in the file once, and the fatbins of kernels that have the same name.

    model.reflib      a ZIP archive, weights not compressed (``archive.py``; every byte is covered by a digest)
      manifest.json           what follows, as data (``manifest.py``): programs, arms, kernels, versions, digests
      wrapper/sm_90.cpp, .so  an arm's host code, as text and compiled
      kernels/k0_add.fatbin   a kernel's images, one an architecture; or, where there is no ``fatbinary``,
      kernels/k0_add.sm_90.cubin, k0_add.ptx ...  the same as members of their own, the manifest being their table
      kernels/cpu.so          an arm for CPUs has its kernels in one library
      weights.safetensors     parameters, buffers, constants; mapped into memory when loaded, not read

``load`` checks, picks the arm for the device (``architectures.py``), maps the weights, and binds the same tables that
``wrap`` would fill in (``wrap/host.py``): a loaded package is called by the same code as a compiled graph, without
Dynamo. ``export_cpp`` writes the arm's text, the images and a small runtime as a CMake project instead.

A package is code: whoever can change the file decides what your process does. Its digests find damage, not malice;
``load(path, sha256=...)`` refuses every file but one.
"""
