"""Libraries for tests that register ops with PyTorch from C, through its C interface alone."""

import subprocess
from collections.abc import Mapping
from pathlib import Path

import torch

from reflib import toolchain

DECLARED = """
#include <stdint.h>
typedef struct AtenTensorOpaque* AtenTensorHandle;
typedef void* Library;
extern "C" {
int32_t aoti_torch_get_data_ptr(AtenTensorHandle, void**);
int32_t aoti_torch_get_numel(AtenTensorHandle, int64_t*);
int32_t aoti_torch_get_sizes(AtenTensorHandle, int64_t**);
int32_t aoti_torch_get_strides(AtenTensorHandle, int64_t**);
int32_t aoti_torch_empty_strided(int64_t, const int64_t*, const int64_t*, int32_t, int32_t, int32_t, AtenTensorHandle*);
int32_t aoti_torch_new_tensor_handle(AtenTensorHandle, AtenTensorHandle*);
int32_t aoti_torch_delete_tensor_object(AtenTensorHandle);
int32_t aoti_torch_library_init_fragment(const char*, const char*, uint32_t, Library*);
int32_t aoti_torch_library_init_impl(const char*, const char*, const char*, uint32_t, Library*);
int32_t aoti_torch_library_def(Library, const char*);
int32_t torch_library_impl(Library, const char*, void (*)(uint64_t*, uint64_t, uint64_t), uint64_t);
int32_t torch_call_dispatcher(const char*, const char*, uint64_t*, uint64_t);
}
static const uint64_t VERSION = 2ull << 56 | 11ull << 48;  // of the interface: PyTorch 2.11's
"""
_REGISTERED = """
static int32_t registered_%(name)s = [] {
  Library d, m;
  aoti_torch_library_init_fragment("%(namespace)s", __FILE__, 1, &d);
  aoti_torch_library_def(d, "%(schema)s");
  aoti_torch_library_init_impl("%(namespace)s", "CPU", __FILE__, 1, &m);
  return torch_library_impl(m, "%(name)s", %(name)s, VERSION);
}();
"""


def build(path: Path, functions: str, ops: Mapping[str, str] | None = None) -> Path:
    """Compile ``functions`` to the shared library ``path``, which is returned.

    ``ops``: {"namespace::name": schema}; the boxed C function of the op's name computes it on CPUs.
    """
    names = [(*op.split("::"), schema) for op, schema in (ops or {}).items()]
    made = [_REGISTERED % {"namespace": space, "name": name, "schema": schema} for space, name, schema in names]
    source = path.with_suffix(".cpp")
    source.write_text("".join([DECLARED, functions, *made]))
    torch_cpu = Path(torch.__file__).parent / "lib" / "libtorch_cpu.so"
    command = [*toolchain.find_compiler(), "-O1", "-fPIC", "-shared", str(source), str(torch_cpu)]
    subprocess.run([*command, "-Wl,--allow-shlib-undefined", "-o", str(path)], check=True, capture_output=True)
    return path
