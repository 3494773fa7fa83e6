// The vocabulary of generated wrappers: owning tensors, and one function per kind of step. Nothing of PyTorch is
// included; see host.h. A step that fails writes the reason into the frame and throws Failed.
#include "host.h"

namespace reflib {

struct Failed {};

// The call in progress. One per thread and call, so it is passed to every step, not global.
struct Run {
  Host* host;
  Frame* frame;
  const Torch& torch;
  Run(Host* h, Frame* f) : host(h), frame(f), torch(*h->torch) {}
  void step(const char* what) { frame->step = what; }
  Run& at(const char* what) { return frame->step = what, *this; }
  [[noreturn]] void fail(int32_t kind) { frame->kind = kind; throw Failed{}; }
  void check(int32_t rc) { if (__builtin_expect(rc != 0, 0)) { if (!frame->kind) frame->kind = FAILED_TORCH; throw Failed{}; } }
};

// A failure's message, written into the frame.
struct Text {
  char* at;
  unsigned long left;
  explicit Text(Frame* frame) : at(frame->text), left(sizeof frame->text) { *at = 0; }
  Text& operator<<(const char* what) {
    while (*what && left > 1) *at++ = *what++, --left;
    return *at = 0, *this;
  }
  Text& operator<<(int64_t n) {
    char digits[24];
    int i = 23;
    uint64_t u = n < 0 ? -(uint64_t)n : (uint64_t)n;
    digits[i] = 0;
    do digits[--i] = char('0' + u % 10); while (u /= 10);
    if (n < 0) digits[--i] = '-';
    return *this << digits + i;
  }
};

// An owned, borrowed or empty tensor. `ptr` is its first element, if it has memory of its own (it is not `opaque`).
class Tensor {
 public:
  Tensor() = default;
  Tensor(const Tensor&) = delete;
  Tensor& operator=(const Tensor&) = delete;
  ~Tensor() { reset(); }

  Handle handle = nullptr;
  char* ptr = nullptr;
  bool opaque = false;

  void own(Run& run, Handle h) {
    reset();
    handle = h, owner = &run.torch;
    void* p = nullptr;
    opaque = run.torch.data_ptr(h, &p) != 0;
    ptr = opaque ? nullptr : (char*)p;
  }
  void borrow(Run& run, Handle h) {
    own(run, h);
    owner = nullptr;
  }
  // `next` takes over the storage and owns the handle; this stays valid as an alias while it lives.
  void pass_to(Tensor& next) {
    next.reset();
    next.handle = handle, next.ptr = ptr, next.opaque = opaque, next.owner = owner;
    owner = nullptr;
  }
  void reset() {
    if (owner) owner->delete_handle(handle);
    handle = nullptr, ptr = nullptr, opaque = false, owner = nullptr;
  }
  // A handle for the caller to own.
  Handle give(Run& run) {
    Handle h = handle;
    if (owner) owner = nullptr;
    else run.check(run.torch.new_handle(handle, &h));
    return h;
  }
  bool aligned(int64_t bytes) const { return (uint64_t)ptr % bytes == 0; }
  int64_t size(Run& run, int d) const { int64_t* s; run.check(run.torch.sizes(handle, &s)); return s[d]; }
  int64_t stride(Run& run, int d) const { int64_t* s; run.check(run.torch.strides(handle, &s)); return s[d]; }

 private:
  const Torch* owner = nullptr;
};

template <int N>
struct Ints {  // a shape or strides; Ints<0> has no elements
  int64_t at[N ? N : 1];
};

// Python's // and %: rounded down.
inline int64_t floor_div(int64_t a, int64_t b) { return a / b - (a % b != 0 && (a < 0) != (b < 0)); }
inline int64_t floor_mod(int64_t a, int64_t b) { return a - floor_div(a, b) * b; }
inline bool within(int64_t a, int64_t limit) { return -limit <= a && a <= limit; }
inline int64_t max(int64_t a, int64_t b) { return a > b ? a : b; }
inline int64_t min(int64_t a, int64_t b) { return a < b ? a : b; }

struct Device {
  int32_t type, index;
};
constexpr Device cpu{0, -1}, anywhere{-1, -1};
constexpr Device cuda(int32_t index) { return {1, index}; }

// The device in this process. -1: the current one.
inline Device placed(Run& run, Device d) { return d.type == 1 && d.index >= 0 ? Device{1, d.index + run.host->gpu} : d; }

template <int N>
void empty(Run& run, Tensor& out, Ints<N> shape, Ints<N> strides, int32_t dtype, Device d) {
  Handle h;
  run.check(run.torch.empty_strided(N, shape.at, strides.at, dtype, d.type, placed(run, d).index, &h));
  out.own(run, h);
}

// Release an input after its last use.
inline void drop(Run& run, Tensor& t, int32_t i) {
  t.reset();
  run.host->drop(run.host, run.frame, i);
}

// A view of a tensor's storage, `offset` elements from the tensor's start.
template <int N>
void view(Run& run, Tensor& out, const Tensor& of, Ints<N> shape, Ints<N> strides, int64_t offset) {
  Handle h;
  run.check(run.torch.reinterpret(of.handle, N, shape.at, strides.at, offset, &h));
  out.own(run, h);
}

// -- kernels -----------------------------------------------------------------------------------------------------
inline Kernel& built(Run& run, int32_t k) {
  Kernel& kernel = run.host->kernels[k];
  if (__builtin_expect(!__atomic_load_n(&kernel.function, __ATOMIC_ACQUIRE), 0)) run.check(run.host->load(run.host, run.frame, k));
  return kernel;
}

// How an argument is passed to a kernel: a tensor by address, a size by value.
inline char* argument(Run& run, const Tensor& t) {
  if (__builtin_expect(t.opaque, 0)) {  // sparse, or a functorch wrapper
    void* p;
    run.check(run.torch.data_ptr(t.handle, &p));
  }
  return t.ptr;
}
inline char* argument(Run&, char* p) { return p; }
inline int64_t argument(Run&, int64_t n) { return n; }

// On a GPU: a grid as `driver_grid` reads it; Triton's two hidden pointers follow the arguments.
template <class... A>
void launch_with(Run& run, int32_t k, void* stream, int64_t grid, A... args) {
  Kernel& kernel = built(run, k);
  void* hidden = nullptr;
  void* params[] = {(void*)&args..., &hidden, &hidden};
  run.step(kernel.name);
  run.check(run.host->launch(run.host, run.frame, &kernel, grid, stream, params));
}
template <class... A>
void launch(Run& run, int32_t k, void* stream, int64_t grid, const A&... args) {
  if (grid > 0) launch_with(run, k, stream, grid, argument(run, args)...);  // 0: an empty tensor
}

struct Range {  // a range in torch.profiler's trace (and in NVTX, under emit_nvtx)
  const Torch& torch;
  void* guard = nullptr;
  Range(Run& run, const char* name) : torch(run.torch) { if (torch.record_start) torch.record_start(name, nullptr, nullptr, 0, &guard); }
  ~Range() { if (guard) torch.record_end(guard); }
};

// On a CPU: a function of pointers, sizes and the number of threads; nonzero: an index was outside its tensor, in one of
// the operations `where`.
template <class... A>
void run_with(Run& run, int32_t k, const char* where, A... args) {
  Kernel& kernel = built(run, k);
  run.step(kernel.name);
  Range range(run, kernel.name);
  if (((int (*)(A..., int))kernel.function)(args..., run.torch.threads()) && kernel.checked) {
    Text(run.frame) << "index out of range in kernel " << kernel.name << where
                    << ": an index is outside the tensor it indexes";
    run.fail(FAILED_INDEX);
  }
}
template <class... A>
void run_kernel(Run& run, int32_t k, const A&... args) {
  run_with(run, k, "", argument(run, args)...);
}
template <class... A>
void run_indexing(Run& run, int32_t k, const char* where, const A&... args) {
  run_with(run, k, where, argument(run, args)...);
}

inline void* stream_of(Run& run, int32_t device) {
  void* s = nullptr;
  run.check(run.torch.current_stream(placed(run, cuda(device)).index, &s));
  return s;
}

inline char* zeros(Run& run, int32_t device, void* stream, int64_t count) {
  void* words = nullptr;
  run.check(run.host->zeros(run.host, run.frame, placed(run, cuda(device)).index, stream, count, &words));
  return (char*)words;
}

// While it lives `device` is the current one.
struct Guard {
  const Torch& torch;
  void* guard = nullptr;
  Guard(Run& run, int32_t device) : torch(run.torch) {
    int32_t now = -1, wanted = placed(run, cuda(device)).index;
    if (torch.current_device) torch.current_device(&now);
    if (now != wanted) run.check(torch.new_guard(wanted, &guard));
  }
  ~Guard() { if (guard) torch.delete_guard(guard); }
};

// -- calls -------------------------------------------------------------------------------------------------------
inline Value none() { return {VALUE_NONE, {nullptr}}; }
inline Value tensor(const Tensor& t) { Value v; v.kind = VALUE_TENSOR; v.tensor = t.handle; return v; }
// An exception that is not a step's own: a C function of the user's threw it.
inline int32_t escaped(Frame* frame) {
  Text(frame) << "an exception of C++ came out of it";
  frame->kind = FAILED_WRAPPER;
  return -1;
}

inline Value integer(int64_t i) { Value v; v.kind = VALUE_INT; v.integer = i; return v; }
inline Value as_kind(int32_t kind, int64_t bits) { Value v; v.kind = kind; v.integer = bits; return v; }
inline Value number(double d) { Value v; v.kind = VALUE_FLOAT; v.number = d; return v; }
inline Value object(int64_t which) { Value v; v.kind = VALUE_OBJECT; v.object = which; return v; }

// Call Python function number `which` of the graph. Results are owned by the caller.
template <int N, int M>
void python(Run& run, int32_t which, const Value (&args)[N], Value (&results)[M]) {
  run.check(run.host->python(run.host, run.frame, which, args, N, results, M));
}
template <int M>
void python(Run& run, int32_t which, Value (&results)[M]) {
  run.check(run.host->python(run.host, run.frame, which, nullptr, 0, results, M));
}
template <int N>
void python(Run& run, int32_t which, const Value (&args)[N]) {
  run.check(run.host->python(run.host, run.frame, which, args, N, nullptr, 0));
}
inline void python(Run& run, int32_t which) {
  run.check(run.host->python(run.host, run.frame, which, nullptr, 0, nullptr, 0));
}

inline void take(Run& run, Tensor& out, const Value& v) {
  if (v.kind == VALUE_TENSOR) out.own(run, v.tensor);
}

// Call a C function by its number: tensors as handles, which remain ours. Nonzero: it failed.
inline Handle plain(const Tensor& t) { return t.handle; }
template <class T> T plain(T v) { return v; }

template <class T, int N>
struct Many {  // a temporary array
  T at[N];
};
template <class T>
using Just = Many<T, 1>;

template <class... A>
int32_t call(Run& run, int32_t symbol, const A&... args) {
  Range range(run, run.frame->step);  // not made by the dispatcher here
  return ((int32_t (*)(decltype(plain(args))...))run.host->symbols[symbol])(plain(args)...);
}

// PyTorch's dispatcher: every argument of the schema as 64 bits, results from the first slot on. The dispatcher takes
// ownership of tensors, lists, strings and values of optionals; results are ours.
constexpr uint64_t DISPATCH_VERSION = 2ull << 56 | 11ull << 48;  // of the encoding: torch 2.11's

template <int N>
int32_t dispatch(Run& run, const char* op, const char* overload, uint64_t (&stack)[N]) {
  return run.torch.dispatch(op, overload, stack, DISPATCH_VERSION);
}

inline uint64_t value(bool b) { return b; }
inline uint64_t value(int32_t i) { return (uint64_t)(int64_t)i; }
inline uint64_t value(int64_t i) { return (uint64_t)i; }
inline uint64_t value(Device d) { return (uint64_t)d.type << 32 | (uint32_t)d.index; }
inline uint64_t value(double d) {
  uint64_t bits;
  __builtin_memcpy(&bits, &d, sizeof bits);
  return bits;
}
inline uint64_t some(uint64_t v) { return (uint64_t)new uint64_t(v); }  // an optional argument; None is 0

inline uint64_t text(Run& run, const char* s) {
  void* made;
  run.check(run.torch.new_string(s, __builtin_strlen(s), &made));
  return (uint64_t)made;
}

inline uint64_t list(Run& run, const uint64_t* items, uint64_t n) {
  void* made;
  run.check(run.torch.new_list(n, &made));
  for (uint64_t i = 0; i < n; ++i) run.check(run.torch.push(made, items[i]));
  return (uint64_t)made;
}
inline uint64_t list(Run& run) { return list(run, nullptr, 0); }
template <int N>
uint64_t list(Run& run, const uint64_t (&items)[N]) { return list(run, items, N); }
template <int N>
uint64_t ints(Run& run, const int64_t (&items)[N]) { return list(run, (const uint64_t*)items, N); }

// A new handle of a tensor, or of a view of it, for the callee to own.
inline uint64_t own(Run& run, const Tensor& t) {
  Handle h;
  run.check(run.torch.new_handle(t.handle, &h));
  return (uint64_t)h;
}
template <int N>
uint64_t own(Run& run, const Tensor& of, Ints<N> shape, Ints<N> strides, int64_t offset) {
  Handle h;
  run.check(run.torch.reinterpret(of.handle, N, shape.at, strides.at, offset, &h));
  return (uint64_t)h;
}

// The tensor that an op makes of `t`, which it takes: a view, mostly.
inline uint64_t seen(Run& run, const char* op, uint64_t t) {
  uint64_t stack[1] = {t};
  run.check(dispatch(run, op, "", stack));
  return stack[0];
}

inline void take(Run& run, Tensor& out, uint64_t result) { out.own(run, (Handle)result); }
inline void ignore(Run& run, uint64_t result) { run.torch.delete_handle((Handle)result); }

// Result `i` of an op that was given memory for it: fails unless it is that memory, laid out as it was.
template <int N>
void given_back(Run& run, uint64_t result, const char* memory, Ints<N> shape, Ints<N> strides, const char* op, int i) {
  Tensor t;
  t.own(run, (Handle)result);
  int64_t dim, *sizes, *steps;
  bool good = t.ptr == memory && !run.torch.dim(t.handle, &dim) && dim == N && !run.torch.sizes(t.handle, &sizes) &&
              !run.torch.strides(t.handle, &steps);
  for (int d = 0; good && d < N; ++d) good = sizes[d] == shape.at[d] && steps[d] == strides.at[d];
  if (good) return;
  Text(run.frame) << op << ": its result " << i << " is not the tensor that it was given to write to: an op with out= "
                  << "arguments must write to them as they are, and return them";
  run.fail(FAILED_WRAPPER);
}

// Result `i` of an op, whose schema says that it shares no memory: fails if it begins in that of `other`.
inline void expect_own(Run& run, const Tensor& t, const Tensor& other, int64_t bytes, const char* op, int i) {
  if (t.ptr < other.ptr || t.ptr >= other.ptr + bytes) return;
  Text(run.frame) << op << ": its result " << i << " shares memory with an argument or with another result, and its "
                  << "schema does not say so: return a clone, or declare the argument as written to and return nothing";
  run.fail(FAILED_WRAPPER);
}

// Result `i` of an op of the user's: fails if it is of another dtype, or its storage ends before its last element.
inline void expect_all(Run& run, const Tensor& t, int32_t dtype, const char* name, int64_t itemsize, const char* op, int i) {
  int64_t dim, *sizes, *steps, offset, held, last = 0;
  int32_t is;
  const Torch& torch = run.torch;
  if (!torch.dtype(t.handle, &is) && is != dtype) {
    Text(run.frame) << op << ": its result " << i << " is not of dtype " << name << ", which its meta function promised";
    run.fail(FAILED_WRAPPER);
  }
  if (!torch.storage_size || torch.dim(t.handle, &dim) || torch.sizes(t.handle, &sizes) ||
      torch.strides(t.handle, &steps) || torch.storage_offset(t.handle, &offset) || torch.storage_size(t.handle, &held))
    return;
  for (int64_t d = 0; d < dim; ++d) {
    if (!sizes[d]) return;
    last += (sizes[d] - 1) * steps[d];
  }
  if ((offset + last + 1) * itemsize <= held) return;
  Text(run.frame) << op << ": its result " << i << " is in a storage of " << held << " bytes, too few for it";
  run.fail(FAILED_WRAPPER);
}

// Does a result have the sizes and strides that the captured graph promised?
template <int N>
bool laid_out(Run& run, const Tensor& t, Ints<N> shape, Ints<N> strides) {
  int64_t dim, *sizes, *steps;
  const Torch& torch = run.torch;
  if (torch.dim(t.handle, &dim) || dim != N || torch.sizes(t.handle, &sizes) || torch.strides(t.handle, &steps)) return false;
  for (int d = 0; d < N; ++d)
    if (sizes[d] != shape.at[d] || steps[d] != strides.at[d]) return false;
  return true;
}

inline Value give(Run& run, Tensor& t) {
  Value v;
  v.kind = VALUE_TENSOR;
  v.tensor = t.give(run);
  return v;
}

// -- the boundary -------------------------------------------------------------------------------------------------
// A required input. `sizes`: -1 where any is accepted. `strides`: null where they do not matter.
struct Expected {
  const char* name;
  const char* dtype_name;
  int32_t dtype;
  Device device;
  int32_t dim;
  const int64_t* sizes;
  const int64_t* strides;
};

[[noreturn]] void refuse(Run& run, int32_t i, const Expected& e, const Value& v);

inline void input(Run& run, Tensor& out, int32_t i, const Value& v, const Expected& e) {
  if (v.kind != VALUE_TENSOR) refuse(run, i, e, v);
  const Torch& t = run.torch;
  int32_t dtype = -1, type = -1, index = -1;
  int64_t dim = -1, *sizes = nullptr, *strides = nullptr;
  t.dtype(v.tensor, &dtype), t.device_type(v.tensor, &type), t.dim(v.tensor, &dim);
  bool good = dtype == e.dtype && (e.device.type < 0 || type == e.device.type) && dim == e.dim;
  if (good && e.device.type > 0) t.device_index(v.tensor, &index), good = index == placed(run, e.device).index;
  if (good) good = !t.sizes(v.tensor, &sizes) && (!e.strides || !t.strides(v.tensor, &strides));
  if (good && dim) {
    bool empty = false;
    for (int d = 0; d < dim; ++d) {
      good &= e.sizes[d] < 0 || sizes[d] == e.sizes[d];
      empty |= sizes[d] == 0;
    }
    if (e.strides && !empty)
      for (int d = 0; d < dim; ++d) good &= e.strides[d] < 0 || sizes[d] == 1 || strides[d] == e.strides[d];
  }
  if (__builtin_expect(!good, 0)) refuse(run, i, e, v);
  out.borrow(run, v.tensor);
  if (__builtin_expect(out.opaque && e.strides, 0)) refuse(run, i, e, v);
}

inline void write_ints(Text& text, int64_t dim, const int64_t* a) {
  text << "[";
  for (int64_t d = 0; d < dim; ++d) {
    if (d) text << ", ";
    if (a[d] < 0) text << "any";
    else text << a[d];
  }
  text << "]";
}

inline Text argument_said(Run& run, int32_t i, const char* name) {
  Text text(run.frame);
  run.frame->argument = i;
  return text << "argument " << (int64_t)i << " (" << name << "): ";
}

// "argument 1 (w): expected float32 [64, 64], strides [64, 1], on cpu"; the caller adds what was passed.
[[noreturn]] __attribute__((noinline)) inline void refuse(Run& run, int32_t i, const Expected& e, const Value& v) {
  Text text = argument_said(run, i, e.name);
  text << "expected " << e.dtype_name << " ";
  write_ints(text, e.dim, e.sizes);
  if (e.strides) write_ints(text << ", strides ", e.dim, e.strides);
  text << (e.device.type < 0 ? " anywhere" : e.device.type ? " on cuda:" : " on cpu");
  if (e.device.type > 0) text << (int64_t)placed(run, e.device).index;
  run.fail(FAILED_ARGUMENT);
}

[[noreturn]] __attribute__((noinline)) inline void differs(
    Run& run, int32_t i, const char* name, const char* kind, int64_t have, int d, int64_t want, const char* what) {
  argument_said(run, i, name) << kind << have << " in dimension " << (int64_t)d << ", expected " << what << " = " << want;
  run.fail(FAILED_ARGUMENT);
}

// A size that depends on a symbol. `what`: its expression when the program was captured.
inline void expect_size(Run& run, int32_t i, const char* name, const Tensor& t, int d, int64_t want, const char* what) {
  int64_t have = t.size(run, d);
  if (__builtin_expect(have != want, 0)) differs(run, i, name, "size ", have, d, want, what);
}

// A stride of a tensor that kernels read. It does not matter in an empty tensor, or for a dimension of size 1.
inline void expect_stride(Run& run, int32_t i, const char* name, const Tensor& t, int d, int64_t want, const char* what) {
  int64_t dim = 0, have = t.stride(run, d);
  if (__builtin_expect(have == want || t.size(run, d) == 1, 1)) return;
  run.torch.dim(t.handle, &dim);
  for (int64_t e = 0; e < dim; ++e)
    if (t.size(run, e) == 0) return;
  differs(run, i, name, "stride ", have, d, want, what);
}

inline void expect_range(Run& run, int32_t i, const char* name, const char* what, int64_t have, int64_t least, int64_t most) {
  if (__builtin_expect(have >= least && have <= most, 1)) return;
  argument_said(run, i, name) << what << " is " << have << ", compiled for " << least << " to " << most;
  run.fail(FAILED_ARGUMENT);
}

struct Named {
  const char* name;
  int64_t value;
};

// A condition on the sizes of the arguments. `what`: its text for messages.
template <int N>
void expect_sizes(Run& run, bool holds, const char* what, const Named (&sizes)[N]) {
  if (__builtin_expect(holds, 1)) return;
  Text text(run.frame);
  run.frame->argument = -1;
  text << "it was exported where " << what << " holds of the arguments' sizes; here ";
  for (int i = 0; i < N; ++i) text << (i ? ", " : "") << sizes[i].name << " = " << sizes[i].value;
  run.fail(FAILED_ARGUMENT);
}

// An int that another argument determines as well.
inline void expect_value(Run& run, int32_t i, const char* name, int64_t have, int64_t want) {
  if (__builtin_expect(have == want, 1)) return;
  argument_said(run, i, name) << have << ", but another argument says " << want;
  run.fail(FAILED_ARGUMENT);
}

inline int64_t symbol(Run& run, int32_t i, const char* name, const Value& v) {
  if (v.kind == VALUE_INT) return v.integer;
  argument_said(run, i, name) << "expected an int of 64 bits";
  run.fail(FAILED_ARGUMENT);
}

}  // namespace reflib
