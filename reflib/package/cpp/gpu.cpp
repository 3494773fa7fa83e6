// A GPU through the CUDA driver, opened at run time: no CUDA toolkit is needed, and no driver for models for CPUs.
#include "cuda_driver.h"
#include "runtime.h"

namespace runtime {
namespace {

// In addition to the functions for launching (cuda_driver.h): devices, memory, streams.
struct Functions {
  CUresult (*DeviceGetCount)(int *);
  CUresult (*DeviceGetName)(char *, int, CUdevice);
  CUresult (*DeviceGetAttribute)(int *, int, CUdevice);
  CUresult (*DriverGetVersion)(int *);
  CUresult (*PrimaryCtxRelease)(CUdevice);
  CUresult (*MemAlloc)(void **, size_t);
  CUresult (*MemFree)(void *);
  CUresult (*MemcpyAsync)(void *, const void *, size_t, CUstream);
  CUresult (*MemsetD8Async)(void *, unsigned char, size_t, CUstream);
  CUresult (*StreamSynchronize)(CUstream);
  // from CUDA 11.2 on
  CUresult (*MemAllocAsync)(void **, size_t, CUstream);
  CUresult (*MemFreeAsync)(void *, CUstream);
  CUresult (*GetDefaultMemPool)(void **, CUdevice);
  CUresult (*MemPoolSetAttribute)(void *, int, void *);
  // from CUDA 11.3 on
  CUresult (*StreamGetCaptureInfo)(CUstream, int *, uint64_t *, void *, void *, void *);
  CUresult (*ThreadExchangeStreamCaptureMode)(int *);
  // from CUDA 11.4 on
  CUresult (*StreamCreate)(CUstream *, unsigned);
  CUresult (*StreamDestroy)(CUstream);
  CUresult (*StreamBeginCapture)(CUstream, int);
  CUresult (*StreamEndCapture)(CUstream, void **);
  CUresult (*GraphInstantiate)(void **, void *, unsigned long long);
  CUresult (*GraphLaunch)(void *, CUstream);
  CUresult (*GraphExecDestroy)(void *);
  CUresult (*GraphDestroy)(void *);
};
const char *const names[] = {
    "cuDeviceGetCount", "cuDeviceGetName", "cuDeviceGetAttribute", "cuDriverGetVersion", "cuDevicePrimaryCtxRelease_v2",
    "cuMemAlloc_v2", "cuMemFree_v2", "cuMemcpyAsync", "cuMemsetD8Async", "cuStreamSynchronize", "cuMemAllocAsync",
    "cuMemFreeAsync", "cuDeviceGetDefaultMemPool", "cuMemPoolSetAttribute", "cuStreamGetCaptureInfo_v2",
    "cuThreadExchangeStreamCaptureMode", "cuStreamCreate", "cuStreamDestroy_v2", "cuStreamBeginCapture_v2",
    "cuStreamEndCapture", "cuGraphInstantiateWithFlags", "cuGraphLaunch", "cuGraphExecDestroy", "cuGraphDestroy"};
enum { NEEDED = 10, COUNT = sizeof names / sizeof *names };
enum { NON_BLOCKING = 1, THREAD_LOCAL = 1, RELAXED = 2 };  // a stream; modes of captures
enum { MAJOR = 75, MINOR = 76, SHARED = 97, POOLS = 115, RELEASE_THRESHOLD = 4 };  // numbers in cuda.h

Driver driver;
Functions cuda;

void check(CUresult r, const char *what) {
  if (!r) return;
  char text[400];
  driver_error(&driver, r, text, sizeof text);
  fail("%s: %s", what, text);
}

void open_driver() {
  static std::mutex lock;
  static bool opened = false;
  std::lock_guard<std::mutex> guard(lock);
  if (opened) return;
  const char *file = "libcuda.so.1";
  if (const char *why = driver_open(&driver, file)) fail("%s", why);
  void *library = dlopen(file, RTLD_NOW), *found[COUNT];
  for (int i = 0; i < COUNT; ++i)
    if (!(found[i] = dlsym(library, names[i])) && i < NEEDED)
      fail("the CUDA driver has no %s: it is too old", names[i]);
  memcpy(&cuda, found, sizeof found);  // the members are in the order of the names
  opened = true;
}

}  // namespace

Gpu::Gpu(int number) : index(number) {
  open_driver();
  int count = 0, major = 0, minor = 0, most = 0, pools = 0;
  CUdevice device;
  check(cuda.DeviceGetCount(&count), "cannot count GPUs");
  if (index < 0 || index >= count) fail("there is no GPU %d; this machine has %d", index, count);
  check(driver.DeviceGet(&device, index), "cannot use the GPU");
  char said[256] = "";
  cuda.DeviceGetName(said, sizeof said, device);
  name = said;
  check(cuda.DeviceGetAttribute(&major, MAJOR, device), "cannot ask the GPU");
  check(cuda.DeviceGetAttribute(&minor, MINOR, device), "cannot ask the GPU");
  check(cuda.DeviceGetAttribute(&most, SHARED, device), "cannot ask the GPU");
  check(cuda.DriverGetVersion(&driver_version), "cannot ask the driver");
  capability = 10 * major + minor, shared = (uint32_t)most;
  check(driver.DevicePrimaryCtxRetain((CUcontext *)&context, device), "cannot use the GPU");
  void *pool;
  uint64_t all = UINT64_MAX;  // freed memory stays with the process, for the next call
  has_pool = cuda.MemAllocAsync && cuda.MemFreeAsync && cuda.GetDefaultMemPool && cuda.MemPoolSetAttribute &&
             !cuda.DeviceGetAttribute(&pools, POOLS, device) && pools && !cuda.GetDefaultMemPool(&pool, device) &&
             !cuda.MemPoolSetAttribute(pool, RELEASE_THRESHOLD, &all);
}

Gpu::~Gpu() {
  {
    Current current(this);
    if (lane) cuda.StreamDestroy((CUstream)lane);
    for (auto &k : kept) cuda.MemFree(k.second);
    for (auto &c : captured) cuda.MemFree(c.first);
  }
  CUdevice device;
  if (!driver.DeviceGet(&device, index)) cuda.PrimaryCtxRelease(device);
}

Gpu::Current::Current(const Gpu *gpu) {
  if (!gpu) return;
  driver.CtxGetCurrent((CUcontext *)&before);
  changed = before != gpu->context;
  if (changed) driver.CtxSetCurrent((CUcontext)gpu->context);  // an error appears in the calls that follow
}
Gpu::Current::~Current() {
  if (changed) driver.CtxSetCurrent((CUcontext)before);
}

// -- memory ------------------------------------------------------------------------------------------------------
namespace {
// While it lives, this thread may do what is no part of a CUDA graph although a stream is being captured.
struct Relaxed {
  int mode = RELAXED;
  Relaxed() { exchange(); }
  ~Relaxed() { exchange(); }
  void exchange() {
    if (cuda.ThreadExchangeStreamCaptureMode) cuda.ThreadExchangeStreamCaptureMode(&mode);
  }
};
}  // namespace

// A graph uses the same addresses at every replay, and nothing says when it is gone: what a captured call allocates is
// freed with this object. What the call gives back serves the same stream of the same capture again.
void *Gpu::allocate_captured(size_t bytes, void *stream, uint64_t capture) {
  std::lock_guard<std::mutex> guard(lock);
  void *memory = nullptr;
  auto found = spare.find(Place{capture, stream, bytes});
  if (found != spare.end()) {
    memory = found->second;
    spare.erase(found);
    return memory;
  }
  Relaxed relaxed;
  check(cuda.MemAlloc(&memory, bytes), "cannot allocate memory for a captured call");
  captured[memory] = capture, has_captured = true;
  return memory;
}

void *Gpu::allocate(size_t bytes, void *stream) {
  if (!bytes) return nullptr;
  void *memory = nullptr;
  Current current(this);
  if (uint64_t capture = captures(stream)) return allocate_captured(bytes, stream, capture);
  if (has_pool) {
    check(cuda.MemAllocAsync(&memory, bytes, (CUstream)stream), "cannot allocate memory");
    return memory;
  }
  std::lock_guard<std::mutex> guard(lock);
  auto found = kept.find({bytes, stream});
  if (found == kept.end()) {
    check(cuda.MemAlloc(&memory, bytes), "cannot allocate memory");
  } else {
    memory = found->second;
    kept.erase(found);
  }
  return memory;
}

void Gpu::release(void *memory, size_t bytes, void *stream) {
  if (!memory) return;
  Current current(this);
  if (has_captured) {
    std::lock_guard<std::mutex> guard(lock);
    auto found = captured.find(memory);
    if (found != captured.end()) return void(spare.insert({Place{found->second, stream, bytes}, memory}));
  }
  if (has_pool) {
    cuda.MemFreeAsync(memory, (CUstream)stream);
  } else {  // reused on the same stream only, so in order
    std::lock_guard<std::mutex> guard(lock);
    kept.insert({{bytes, stream}, memory});
  }
}

void Gpu::copy(void *to, const void *from, size_t bytes, void *stream) {
  if (bytes) check(cuda.MemcpyAsync(to, from, bytes, (CUstream)stream), "cannot copy");
}
void Gpu::zero(void *memory, size_t bytes, void *stream) {
  check(cuda.MemsetD8Async(memory, 0, bytes, (CUstream)stream), "cannot clear memory");
}
void Gpu::wait(void *stream) { check(cuda.StreamSynchronize((CUstream)stream), "the GPU's work failed"); }

uint64_t Gpu::captures(void *stream) {
  int status = 0;
  uint64_t capture = 0;
  if (!driver.StreamIsCapturing || driver.StreamIsCapturing((CUstream)stream, &status) || !status) return 0;
  if (!cuda.StreamGetCaptureInfo || !cuda.ThreadExchangeStreamCaptureMode)
    fail("a call cannot be captured in a CUDA graph with this driver: CUDA 11.3 is needed");
  check(cuda.StreamGetCaptureInfo((CUstream)stream, &status, &capture, nullptr, nullptr, nullptr), "the capture failed");
  return capture;
}

bool Gpu::can_capture() const {
  return driver.StreamIsCapturing && cuda.StreamGetCaptureInfo && cuda.ThreadExchangeStreamCaptureMode &&
         cuda.StreamCreate && cuda.StreamDestroy && cuda.StreamBeginCapture && cuda.StreamEndCapture &&
         cuda.GraphInstantiate && cuda.GraphLaunch && cuda.GraphExecDestroy && cuda.GraphDestroy;
}

void *Gpu::begin_capture() {
  Current current(this);
  if (!lane) check(cuda.StreamCreate((CUstream *)&lane, NON_BLOCKING), "cannot make a stream");
  check(cuda.StreamBeginCapture((CUstream)lane, THREAD_LOCAL), "cannot begin a capture");
  return lane;
}

void *Gpu::end_capture(void *stream) {
  Current current(this);
  void *graph = nullptr, *made = nullptr;
  if (cuda.StreamEndCapture((CUstream)stream, &graph) || !graph) return nullptr;
  if (cuda.GraphInstantiate(&made, graph, 0)) made = nullptr;
  cuda.GraphDestroy(graph);
  return made;
}

void Gpu::replay(void *graph, void *stream) { check(cuda.GraphLaunch(graph, (CUstream)stream), "cannot launch a graph"); }

void Gpu::forget(void *graph) {
  Current current(this);
  cuda.GraphExecDestroy(graph);
}

// -- kernels -----------------------------------------------------------------------------------------------------
void Gpu::load(Kernel &k, const KernelRow &row) {
  Current current(this);
  Relaxed relaxed;
  if (CUresult r = driver_load(&driver, &k, row.image, row.symbol, -1))
    check(r, (std::string("cannot load kernel ") + row.name).c_str());
}

void Gpu::unload(Kernel &k) { driver_unload(&driver, &k); }

void Gpu::launch(const Kernel &k, int64_t grid, void *stream, void **params) {
  unsigned n[3];
  if (const char *why = driver_grid(grid, n)) fail("%s", why);
  check(driver_launch(&driver, &k, grid, (CUstream)stream, params), "cannot launch");
}

}  // namespace runtime
