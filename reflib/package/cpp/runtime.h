// The interfaces between the parts of the runtime: tables.cpp (generated) describes the model, gpu.cpp is the CUDA
// driver, tensors.cpp the memory that a wrapper works on, values.cpp the caller's tensors, model.cpp the rest.
// The wrapper (wrapper*.cpp, printed by reflib) includes host.h only.
#pragma once
#include <atomic>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <set>
#include <string>
#include <tuple>
#include <vector>

#include "host.h"
#include "model.h"

namespace runtime {

struct Error {
  std::string text;
};
[[noreturn]] void fail(const char *format, ...) __attribute__((format(printf, 1, 2)));
inline thread_local std::string last_error;

// 0, or -1 and `last_error`: no exception leaves a function that C calls.
template <class F>
int32_t caught(F f) {
  try {
    f();
    return 0;
  } catch (const Error &e) {
    last_error = e.text;
  } catch (const std::exception &e) {
    last_error = e.what();
  }
  return -1;
}

// Fails as `f` does, with `what` before the reason.
template <class F>
void named(const char *what, F f) {
  try {
    f();
  } catch (const Error &e) {
    fail("%s: %s", what, e.text.c_str());
  }
}

// -- tables.cpp --------------------------------------------------------------------------------------------------
struct KernelRow {
  const char *name, *symbol;
  const void *image;    // for a GPU: in this library
  const char *library;  // for a CPU: a file beside this library
  uint32_t threads, shared;
  bool early, checked;
  bool late;  // few calls need it: loaded at the first of them
};

struct NanCheck {  // of what a step wrote and read
  const char *what;  // the step; null: this is no check
  std::vector<const char *> names;
  size_t wrote;  // the first of them; the others are only read
  bool infinite;  // by its constants
  const char *origins;
};

struct Variant {
  const char *arch;  // "sm_90", "ptx", "cpu"
  int driver;        // the least version of the CUDA driver
  const char *graph;
  WrapperEntry call;
  std::vector<KernelRow> kernels;
  std::vector<const char *> symbols;  // C functions that it calls
  std::vector<const char *> python;   // the error of each Python function; null: it only writes to a log
  std::vector<NanCheck> checks;       // those of them that look for NaN
  std::vector<reflib_value> objects;  // constant results
  std::vector<int> constants;         // weights bound to it
  std::vector<const char *> cpu;      // features that the processor must have
  bool recorded;                      // calls are recorded and replayed (graphs.cpp)
};

struct Span {  // of the weights' file: one storage, which tensors share
  size_t start, bytes;
};

struct Weight {
  const char *name;
  int32_t dtype;
  bool on_gpu;
  size_t span, offset;  // number of the span; bytes from its start
  std::vector<int64_t> sizes, strides;
};

struct Argument {  // of the caller's
  const char *name;
  int32_t kind, dtype;
  bool on_gpu;
  std::vector<int64_t> sizes, strides;  // an example
};

enum Place { CALLER, WEIGHT, UNUSED };  // where an input comes from
struct Slot {
  Place place;
  int which;  // argument or weight
};

struct Code {
  int capability;   // 80, 90; 0: there is none
  uint32_t shared;  // bytes of shared memory that its largest kernel needs
};

struct Tables {
  std::vector<Variant> variants;
  std::vector<Code> machine_code;  // of the package, exported or not
  Code text;                       // assembly text, for that capability and later ones
  const char *weights_file;        // beside the library
  size_t weights_bytes;
  std::vector<Span> spans;
  std::vector<Weight> weights;
  std::vector<Argument> arguments;
  std::vector<Slot> inputs;
  std::vector<size_t> written;  // inputs that the wrapper writes to
  int32_t outputs;
};
extern const Tables tables;
inline reflib_value integer(int64_t i) { reflib_value v{}; v.kind = REFLIB_INT, v.integer = i; return v; }
inline reflib_value number(double d) { reflib_value v{}; v.kind = REFLIB_FLOAT, v.number = d; return v; }
inline reflib_value truth(bool b) { reflib_value v{}; v.kind = REFLIB_TRUTH, v.integer = b; return v; }
inline reflib_value words(const char *s) { reflib_value v{}; v.kind = REFLIB_TEXT, v.text = s; return v; }

// -- gpu.cpp -----------------------------------------------------------------------------------------------------
class Gpu {
 public:
  explicit Gpu(int index);  // opens the driver, and retains the primary context
  ~Gpu();
  int index, capability, driver_version;
  uint32_t shared;  // bytes of shared memory per thread block
  std::string name;

  void *allocate(size_t bytes, void *stream);
  void release(void *memory, size_t bytes, void *stream);
  void copy(void *to, const void *from, size_t bytes, void *stream);  // any direction
  void zero(void *memory, size_t bytes, void *stream);
  void wait(void *stream);
  uint64_t captures(void *stream);  // which capture into a CUDA graph; 0: none
  bool can_capture() const;
  void *begin_capture();            // a stream, whose work is captured
  void *end_capture(void *stream);  // the graph, to be replayed; null: the capture failed
  void replay(void *graph, void *stream);
  void forget(void *graph);

  void load(Kernel &kernel, const KernelRow &row);
  void unload(Kernel &kernel);
  void launch(const Kernel &kernel, int64_t grid, void *stream, void **params);

  // Makes the GPU's context current in this thread while it lives. Null: does nothing.
  struct Current {
    explicit Current(const Gpu *gpu);
    ~Current();
    void *before = nullptr;
    bool changed = false;
  };

 private:
  typedef std::tuple<uint64_t, void *, size_t> Place;  // a capture, a stream, bytes
  void *allocate_captured(size_t bytes, void *stream, uint64_t capture);
  void *context = nullptr;
  void *lane = nullptr;   // a stream to capture on
  bool has_pool = false;  // the driver caches freed memory; else:
  std::mutex lock;
  std::multimap<std::pair<size_t, void *>, void *> kept;  // by size and stream
  std::map<void *, uint64_t> captured;                    // memory of captured calls, with the capture
  std::multimap<Place, void *> spare;                     // of those, what was given back
  std::atomic<bool> has_captured{false};
};

// -- values.cpp --------------------------------------------------------------------------------------------------
// Bytes from a tensor's first element to its last. Fails for dimensions, sizes and strides that no tensor can have.
size_t bytes_of(int64_t dim, const int64_t *sizes, const int64_t *strides, int32_t dtype);
std::vector<int64_t> sizes_of(const reflib_tensor &t);
std::vector<int64_t> strides_of(const reflib_tensor &t);
// A handle as a value that owns it.
reflib_value described(Handle h);
// Fails for a tensor of the caller's that the model cannot use.
void check_tensor(const reflib_tensor &t, const std::shared_ptr<Gpu> &gpu, bool is_new = false);
// "float32 [8, 16], strides [16, 1], on cpu", for messages.
std::string said(const reflib_value &v);
void copy(const std::shared_ptr<Gpu> &gpu, void *stream, const reflib_value &to, const reflib_value &from);

// -- nan.cpp -----------------------------------------------------------------------------------------------------
// What is wrong with the values of a step; "": nothing.
std::string bad_value(const NanCheck &check, const std::shared_ptr<Gpu> &gpu, void *stream, const Value *args);

// -- tensors.cpp, or tensors_torch.cpp -----------------------------------------------------------------------------
// The functions that a wrapper works with. Fails if some are missing.
const Torch &torch();
// A tensor over memory that it does not own. The caller deletes it.
Handle in_memory(void *data, int32_t dtype, const std::shared_ptr<Gpu> &gpu, const std::vector<int64_t> &sizes,
                 const std::vector<int64_t> &strides);
// How many tensors are in its storage; 0: the storage is not its own. (Not where PyTorch allocates.)
long uses(Handle h);
// While it lives, this thread allocates on the GPU (null: on the CPU), in the order of the stream.
struct Scope {
  Scope(const std::shared_ptr<Gpu> &gpu, void *stream);
  ~Scope();
  Gpu::Current current;
  void *state;
};

// -- graphs.cpp --------------------------------------------------------------------------------------------------
class Recordings {
 public:
  typedef std::vector<int64_t> Call;                          // all that one must have in common with another
  typedef std::function<int32_t(void *, Value *)> Wrapper;    // of a stream and the outputs
  explicit Recordings(const std::shared_ptr<Gpu> &gpu) : gpu(gpu) {}
  ~Recordings();
  // It went well without a recording, and has loaded its kernels: the next one may be recorded.
  void ran(const Call &call);
  // Does the call by a recording, maybe a new one; false: there is none, and nothing has happened.
  bool run(void *stream, const Call &call, const Wrapper &wrapper, std::vector<Value> &out);

 private:
  struct Recording {
    void *graph = nullptr;
    std::vector<Value> outputs;
    std::vector<long> uses;  // of an output's storage, when nothing else refers to it
  };
  bool replay(const Recording &r, void *stream, std::vector<Value> &out);
  void forget(Recording &r);
  std::shared_ptr<Gpu> gpu;
  std::mutex lock;
  bool failed = false;
  std::multimap<Call, Recording> made;
  std::set<Call> seen;
};

}  // namespace runtime
