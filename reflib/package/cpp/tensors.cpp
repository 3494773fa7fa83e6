// Tensors without PyTorch: memory with sizes and strides. What a wrapper does with them, it does by a table of
// functions (host.h); these are all that a wrapper without ATen calls.
#include <cstdlib>
#include <dlfcn.h>
#include <thread>

#include "runtime.h"

namespace runtime {

struct Work {  // what a thread works on
  std::shared_ptr<Gpu> gpu;
  void *stream;
};
static thread_local Work *work;

struct Storage {  // freed with the last tensor in it
  char *data = nullptr;
  size_t bytes = 0;
  std::shared_ptr<Gpu> gpu;
  void *stream = nullptr;
  bool owned = true;
  ~Storage() {
    if (owned && gpu) gpu->release(data, bytes, stream);
    if (owned && !gpu) std::free(data);
  }
};

}  // namespace runtime

struct AtenTensorOpaque {
  std::shared_ptr<runtime::Storage> storage;
  char *data;
  int32_t dtype;
  std::vector<int64_t> sizes, strides;
};

namespace runtime {

// The functions below return 0 or have failed, as PyTorch's do.
static int32_t empty_strided(int64_t dim, const int64_t *sizes, const int64_t *strides, int32_t dtype, int32_t device,
                             int32_t, Handle *out) {
  return caught([&] {
    auto storage = std::make_shared<Storage>();
    storage->bytes = bytes_of(dim, sizes, strides, dtype);
    if (device == 0) {
      storage->data = (char *)std::aligned_alloc(64, (storage->bytes + 63) / 64 * 64);
      if (!storage->data && storage->bytes) fail("out of memory: %zu bytes", storage->bytes);
    } else {
      if (!work || !work->gpu) fail("a model for CPUs wants memory on a GPU");
      storage->gpu = work->gpu, storage->stream = work->stream;
      storage->data = (char *)work->gpu->allocate(storage->bytes, work->stream);
    }
    *out = new AtenTensorOpaque{storage, storage->data, dtype, {sizes, sizes + dim}, {strides, strides + dim}};
  });
}

static int32_t reinterpret(Handle t, int64_t dim, const int64_t *sizes, const int64_t *strides, int64_t offset,
                           Handle *out) {
  char *data = t->data + offset * (int64_t)reflib_dtype_size(t->dtype);
  *out = new AtenTensorOpaque{t->storage, data, t->dtype, {sizes, sizes + dim}, {strides, strides + dim}};
  return 0;
}

static int32_t new_handle(Handle t, Handle *out) { return *out = new AtenTensorOpaque(*t), 0; }
static int32_t delete_handle(Handle t) { return delete t, 0; }
static int32_t data_ptr(Handle t, void **out) { return *out = t->data, 0; }
static int32_t sizes(Handle t, int64_t **out) { return *out = t->sizes.data(), 0; }
static int32_t strides(Handle t, int64_t **out) { return *out = t->strides.data(), 0; }
static int32_t dim(Handle t, int64_t *out) { return *out = (int64_t)t->sizes.size(), 0; }
static int32_t dtype(Handle t, int32_t *out) { return *out = t->dtype, 0; }
static int32_t device_type(Handle t, int32_t *out) { return *out = t->storage->gpu ? 1 : 0, 0; }
static int32_t device_index(Handle t, int32_t *out) { return *out = t->storage->gpu ? t->storage->gpu->index : -1, 0; }

// As many as OpenMP has, whose runtime came with the kernels; OMP_NUM_THREADS says how many that is.
static int32_t threads() {
  static auto most = (int (*)())dlsym(RTLD_DEFAULT, "omp_get_max_threads");
  return most ? most() : (int32_t)std::thread::hardware_concurrency();
}

static int32_t current_stream(int32_t, void **out) { return *out = work->stream, 0; }
static int32_t current_device(int32_t *out) { return *out = work->gpu ? work->gpu->index : -1, 0; }
static int32_t new_guard(int32_t, void **) { return last_error = "a model runs on one GPU", -1; }
static int32_t delete_guard(void *) { return 0; }
static const char *what() { return last_error.c_str(); }

const Torch &torch() {
  static const Torch table = [] {
    Torch t{};  // null: calls of ATen, and a profiler's ranges
    t.empty_strided = empty_strided, t.reinterpret = reinterpret;
    t.new_handle = new_handle, t.delete_handle = delete_handle;
    t.data_ptr = data_ptr, t.sizes = sizes, t.strides = strides, t.dim = dim, t.dtype = dtype;
    t.device_type = device_type, t.device_index = device_index, t.threads = threads;
    t.current_stream = current_stream, t.current_device = current_device;
    t.new_guard = new_guard, t.delete_guard = delete_guard, t.what = what;
    return t;
  }();
  return table;
}

Handle in_memory(void *data, int32_t dtype, const std::shared_ptr<Gpu> &gpu, const std::vector<int64_t> &sizes,
                 const std::vector<int64_t> &strides) {
  auto storage = std::make_shared<Storage>();
  storage->owned = false, storage->gpu = gpu;
  return new AtenTensorOpaque{storage, (char *)data, dtype, sizes, strides};
}

long uses(Handle t) { return t->storage->owned ? t->storage.use_count() : 0; }

Scope::Scope(const std::shared_ptr<Gpu> &gpu, void *stream) : current(gpu.get()), state(work) {
  work = new Work{gpu, stream};
}
Scope::~Scope() {
  delete work;
  work = (Work *)state;
}

}  // namespace runtime
