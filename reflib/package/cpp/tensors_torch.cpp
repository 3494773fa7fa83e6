// Tensors that are PyTorch's, because the wrapper calls ATen. PyTorch's C interface is found by name in the libraries
// that this one is linked to; none of its headers are needed, and every version from 2.11 on will do.
#include <cstring>
#include <dlfcn.h>

#include "runtime.h"

namespace runtime {
namespace {

enum { CPU, CUDA, OPTIONAL };
const struct {
  const char *name;
  int where;
} names[] = {  // in the order of Torch in host.h
    {"aoti_torch_empty_strided", CPU},
    {"aoti_torch__reinterpret_tensor", CPU},
    {"aoti_torch_new_tensor_handle", CPU},
    {"aoti_torch_delete_tensor_object", CPU},
    {"aoti_torch_get_data_ptr", CPU},
    {"aoti_torch_get_sizes", CPU},
    {"aoti_torch_get_strides", CPU},
    {"aoti_torch_get_dim", CPU},
    {"aoti_torch_get_dtype", CPU},
    {"aoti_torch_get_device_type", CPU},
    {"aoti_torch_get_device_index", CPU},
    {"torch_call_dispatcher", CPU},
    {"torch_new_list_reserve_size", CPU},
    {"torch_list_push_back", CPU},
    {"torch_new_string_handle", CPU},
    {"aoti_record_function_start", OPTIONAL},
    {"aoti_record_function_end", OPTIONAL},
    {"_ZN2at15get_num_threadsEv", CPU},
    {"aoti_torch_get_current_cuda_stream", CUDA},
    {"aoti_torch_get_current_device_index", OPTIONAL},
    {"aoti_torch_create_cuda_guard", CUDA},
    {"aoti_torch_delete_cuda_guard", CUDA},
    {"torch_exception_get_what_without_backtrace", OPTIONAL},
};

template <class F>
F *function(const char *name) {
  void *found = dlsym(RTLD_DEFAULT, name);
  if (!found) fail("PyTorch's libraries have no %s: PyTorch 2.11 or later is needed, with CUDA for a GPU", name);
  return (F *)found;
}

}  // namespace

const Torch &torch() {
  static const Torch table = [] {
    void *found[sizeof names / sizeof *names];
    static_assert(sizeof found == sizeof(Torch), "host.h names as many functions");
    for (size_t i = 0; i < sizeof names / sizeof *names; ++i)
      found[i] = names[i].where == CPU ? (void *)function<void()>(names[i].name) : dlsym(RTLD_DEFAULT, names[i].name);
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
