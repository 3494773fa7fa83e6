// The parts of the runtime, and what they know of each other: tables.cpp (generated) says what the model consists of,
// gpu.cpp is the CUDA driver, tensors.cpp the memory that a wrapper works on, model.cpp puts them together.
// The wrapper (wrapper*.cpp, printed by reflib) sees host.h alone.
#pragma once
#include <map>
#include <memory>
#include <mutex>
#include <string>
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

// Bytes from a tensor's first element to its last. Fails for what no tensor can have.
size_t bytes_of(int64_t dim, const int64_t *sizes, const int64_t *strides, int32_t dtype);

// -- tables.cpp --------------------------------------------------------------------------------------------------
struct KernelRow {
  const char *name, *symbol;
  const void *image;    // for a GPU: in this library
  const char *library;  // for a CPU: a file beside this library
  uint32_t threads, shared;
  bool early, checked;
  bool late;  // few calls need it: loaded when the first does
};

struct Arm {
  const char *arch;  // "sm_90", "ptx", "cpu"
  int driver;        // the least version of the CUDA driver
  const char *graph;
  WrapperEntry call;
  std::vector<KernelRow> kernels;
  std::vector<const char *> symbols;  // C functions that it calls
  std::vector<const char *> python;   // what it has Python functions for; null: for nothing but a note in a log
  std::vector<reflib_value> objects;  // results that are the same in every call
  std::vector<int> constants;         // weights that it holds
  std::vector<const char *> cpu;      // what the processor must be able to do
};

struct Span {  // of the weights' file: tensors in it share a storage
  size_t start, bytes;
};

struct Weight {
  const char *name;
  int32_t dtype;
  bool on_gpu;
  size_t span, offset;  // which one; bytes from its start
  std::vector<int64_t> sizes, strides;
};

struct Argument {  // of the caller's
  const char *name;
  int32_t kind, dtype;
  bool on_gpu;
  std::vector<int64_t> sizes, strides;  // an example
};

enum Place { CALLER, WEIGHT, NOBODY };  // where an input comes from (NOBODY: it is not looked at), or an output goes to
struct Slot {
  Place place;
  int which;  // argument or weight; of an output: -1 for a new tensor, else its elements are copied there
};

struct Code {
  int capability;   // that it was made for: 80, 90; 0: there is none
  uint32_t shared;  // bytes of shared memory that one of its kernels wants
};

struct Tables {
  std::vector<Arm> arms;
  std::vector<Code> machine_code;  // of the package, whether or not it is in here
  Code text;                       // assembly text, for that capability and later ones
  size_t weights_bytes;
  std::vector<Span> spans;
  std::vector<Weight> weights;
  std::vector<Argument> arguments;
  std::vector<Slot> inputs, outputs;
};
extern const Tables tables;
inline reflib_value integer(int64_t i) { reflib_value v{}; v.kind = REFLIB_INT, v.integer = i; return v; }
inline reflib_value number(double d) { reflib_value v{}; v.kind = REFLIB_FLOAT, v.number = d; return v; }

// -- gpu.cpp -----------------------------------------------------------------------------------------------------
class Gpu {
 public:
  explicit Gpu(int index);  // finds the driver, and takes the context that CUDA programs share
  ~Gpu();
  int index, capability, driver_version;
  uint32_t shared;  // bytes of shared memory that a block may have
  std::string name;

  void *allocate(size_t bytes, void *stream);
  void release(void *memory, size_t bytes, void *stream);
  void copy(void *to, const void *from, size_t bytes, void *stream);  // any direction
  void zero(void *memory, size_t bytes, void *stream);
  void wait(void *stream);
  bool captures(void *stream);

  void load(Kernel &kernel, const KernelRow &row);
  void unload(Kernel &kernel);
  void launch(const Kernel &kernel, unsigned grid, void *stream, void **params);

  // While it lives the GPU's context is the thread's. Null: nothing happens.
  struct Current {
    explicit Current(const Gpu *gpu);
    ~Current();
    void *before = nullptr;
    bool changed = false;
  };

 private:
  void *context = nullptr;
  bool has_pool = false;  // the driver keeps freed memory itself; else:
  std::mutex lock;
  std::multimap<std::pair<size_t, void *>, void *> kept;  // by size and stream
};

// -- tensors.cpp, or tensors_torch.cpp -----------------------------------------------------------------------------
// The functions that a wrapper works with. Fails if some are missing.
const Torch &torch();
// A tensor in memory that stays whose it is. For the caller to delete.
Handle in_memory(void *data, int32_t dtype, const std::shared_ptr<Gpu> &gpu, const std::vector<int64_t> &sizes,
                 const std::vector<int64_t> &strides);
// While it lives, memory in this thread is the GPU's (null: the CPU's), in the order of the stream.
struct Scope {
  Scope(const std::shared_ptr<Gpu> &gpu, void *stream);
  ~Scope();
  Gpu::Current current;
  void *state;
};

}  // namespace runtime
