"""Stage 9, ``package``: a compiled model in one file for GPUs of several generations, which runs without a compiler.

``aot_compile`` captures a model once per kind of device (``capture/export.py``; the GPU need not be present), and runs
fuse, autotune, schedule, plan and generate once per architecture: a tiling for Hopper does not fit into an RTX 4090's
shared memory, and a different split means different kernels. So a package has one *variant* per architecture: a wrapper
in C++, printed and compiled as for ``wrapper="cpp"``, and the machine code of its kernels. The fallback variant is
assembly text (PTX, of the sm_80 program), which drivers of later GPUs compile. Variants share the weights, and the
fatbins of kernels with the same name.

    model.reflib      a ZIP archive, weights not compressed (``archive.py``; a digest per member)
      manifest.json           ``manifest.py``: programs, variants, kernels, versions, digests
      wrapper/HASH.cpp, .so   a variant's host code, as text and compiled
      wrapper/HASH.py         the same in Python, where nothing can call the compiled code, for lack of a C compiler
      kernels/k0_add.fatbin   a kernel's images for all architectures; or, where there is no ``fatbinary``,
      kernels/k0_add.sm_90.cubin, k0_add.ptx ...  one member per image
      kernels/HASH.so         the kernels of a variant for CPUs, in one library
      weights.safetensors     parameters, buffers, constants; mapped into memory when loaded, not read

``load`` checks the file, chooses the variant for the device (``architectures.py``), maps the weights, and binds the
tables that ``wrap`` fills in for a compiled graph (``wrap/host.py``): a loaded package is called by the same code,
without Dynamo. ``export_cpp`` writes the text, the images and a small runtime as a CMake project instead.

``join_packages`` puts the packages of several models into one file, where equal weights are stored once (``join.py``).

A package is code: whoever can change the file controls your process. Its digests find damage, not malice;
``load(path, sha256=...)`` refuses every other file.
"""
