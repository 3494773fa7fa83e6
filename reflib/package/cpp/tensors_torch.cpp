// Tensors that are PyTorch's, because the wrapper calls ATen. PyTorch's C interface is found by name in the libraries
// that this one is linked to; none of its headers are needed, and every version from 2.11 on will do.
#include <cstring>
#include <dlfcn.h>

#include "runtime.h"

namespace runtime {
namespace {

// in the order of Torch in host.h; those that not every PyTorch has are not needed
const struct {
  const char *name;
  bool needed;
} functions[] = {@FUNCTIONS@};

template <class F>
F *function(const char *name) {
  void *found = dlsym(RTLD_DEFAULT, name);
  if (!found) fail("PyTorch's libraries have no %s: PyTorch 2.11 or later is needed, with CUDA for a GPU", name);
  return (F *)found;
}

}  // namespace

const Torch &torch() {
  static const Torch table = [] {
    void *found[sizeof functions / sizeof *functions];
    static_assert(sizeof found == sizeof(Torch), "host.h names as many functions");
    for (size_t i = 0; i < sizeof functions / sizeof *functions; ++i)
      found[i] = functions[i].needed ? (void *)function<void()>(functions[i].name) : dlsym(RTLD_DEFAULT, functions[i].name);
    Torch t;
    memcpy((void *)&t, found, sizeof t);
    return t;
  }();
  return table;
}

Handle in_memory(void *data, int32_t dtype, const std::shared_ptr<Gpu> &gpu, const std::vector<int64_t> &sizes,
                 const std::vector<int64_t> &strides) {
  typedef int32_t Create(void *, int64_t, const int64_t *, const int64_t *, int64_t, int32_t, int32_t, int32_t, Handle *);
  static auto create = function<Create>("aoti_torch_create_tensor_from_blob");
  Handle h;
  if (create(data, (int64_t)sizes.size(), sizes.data(), strides.data(), 0, dtype, gpu ? 1 : 0, gpu ? gpu->index : -1, &h))
    fail("PyTorch cannot make a tensor of this memory");
  return h;
}

long uses(Handle) { return 0; }

Scope::Scope(const std::shared_ptr<Gpu> &gpu, void *stream) : current(gpu.get()), state(nullptr) {
  if (!gpu) return;
  static auto create = function<int32_t(void *, int32_t, void **)>("aoti_torch_create_cuda_stream_guard");
  if (create(stream, gpu->index, &state)) fail("PyTorch cannot use the stream");
}
Scope::~Scope() {
  static auto end = (int32_t(*)(void *))dlsym(RTLD_DEFAULT, "aoti_torch_delete_cuda_stream_guard");
  if (state) end(state);
}

}  // namespace runtime
