// The functions of model.h, from the other parts: load, call, unload.
#include <algorithm>
#include <cerrno>
#include <cstdarg>
#include <cstdlib>
#include <cstring>
#include <dlfcn.h>
#include <fcntl.h>
#include <fstream>
#include <iterator>
#include <sstream>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include "runtime.h"

using namespace runtime;

struct reflib_model {
  reflib_model() = default;
  reflib_model(const char *weights, int gpu);  // the destructor undoes it wherever it fails
  ~reflib_model();

  Host host{};  // the first member: the wrapper passes its address back
  std::shared_ptr<Gpu> gpu;
  const Variant *variant = nullptr;
  std::vector<Kernel> kernels;
  std::vector<void *> libraries, symbols;
  std::vector<Handle> weights, constants;

  char *file = nullptr;             // the weights', mapped
  std::vector<char *> here, there;  // by span: its memory on the CPU, on the GPU
  std::vector<void *> copies;       // of spans that are not aligned in the file

  struct Words {
    void *memory;
    size_t bytes;
  };
  std::mutex lock;
  std::map<void *, Words> words;  // by stream
  std::vector<std::pair<void *, Words>> old_words;
  std::unique_ptr<Recordings> recordings;  // null: calls are not recorded

 private:
  void choose_variant(int number);
  void load_weights(const char *path);
  char *span(size_t i, bool on_gpu);
  void load_kernels();
};

namespace runtime {

void fail(const char *format, ...) {
  char text[2000];
  va_list args;
  va_start(args, format);
  vsnprintf(text, sizeof text, format, args);
  va_end(args);
  throw Error{text};
}

namespace {

// -- functions for the wrapper -----------------------------------------------------------------------------------
reflib_model *model_of(Host *host) { return (reflib_model *)host; }

int32_t refused(Frame *frame, int32_t kind, const std::string &why) {
  frame->kind = kind;
  snprintf(frame->text, sizeof frame->text, "%s", why.c_str());
  return -1;
}

template <class F>
int32_t asked(Frame *frame, F f) {
  return caught(f) ? refused(frame, FAILED_DRIVER, last_error) : 0;
}

int32_t call_python(Host *host, Frame *frame, int32_t which, const Value *args, int32_t, Value *, int32_t) {
  reflib_model *m = model_of(host);
  if (m->variant->checks[which].what) {
    std::string bad;
    int32_t rc = asked(frame, [&] {
      void *stream = nullptr;
      if (m->gpu) torch().current_stream(m->gpu->index, &stream);
      bad = bad_value(m->variant->checks[which], m->gpu, stream, args);
    });
    return rc || bad.empty() ? rc : refused(frame, FAILED_PYTHON, bad);
  }
  const char *why = m->variant->python[which];
  if (!why) return 0;
  const char *what = torch().what ? torch().what() : nullptr;
  return refused(frame, FAILED_PYTHON, std::string(why) + (what && *what ? std::string(": ") + what : ""));
}

int32_t load_kernel(Host *host, Frame *frame, int32_t i) {
  reflib_model *m = model_of(host);
  return asked(frame, [&] {
    std::lock_guard<std::mutex> guard(m->lock);
    const KernelRow &row = m->variant->kernels[i];
    if (!row.image) fail("kernel %s is for empty tensors: it has no code", row.name);
    if (!m->kernels[i].function) m->gpu->load(m->kernels[i], row);
  });
}

int32_t zero_words(Host *host, Frame *frame, int32_t, void *stream, int64_t count, void **words) {
  reflib_model *m = model_of(host);
  return asked(frame, [&] {
    size_t bytes = 4096 * ((4 * (size_t)count + 4095) / 4096);
    if (m->gpu->captures(stream)) {  // of this graph alone
      *words = m->gpu->allocate(bytes, stream);
      return m->gpu->zero(*words, bytes, stream);
    }
    std::lock_guard<std::mutex> guard(m->lock);
    auto &w = m->words[stream];
    if (w.bytes < 4 * (size_t)count) {
      if (w.memory) m->old_words.push_back({stream, w});  // a call on the stream may still use it
      w = {};
      w.memory = m->gpu->allocate(bytes, stream), w.bytes = bytes;
      m->gpu->zero(w.memory, bytes, stream);
    }
    *words = w.memory;
  });
}

int32_t launch_kernel(Host *host, Frame *frame, const Kernel *k, int64_t grid, void *stream, void **params) {
  return asked(frame, [&] {
    model_of(host)->gpu->launch(*k, grid, stream, params);
  });
}

void drop_input(Host *, Frame *, int32_t) {}  // the caller owns inputs

// -- files and the processor -------------------------------------------------------------------------------------
std::string beside(const char *name) {
  Dl_info info;
  if (!dladdr((void *)drop_input, &info) || !info.dli_fname) fail("cannot find the path of this library");
  std::string path = info.dli_fname;
  size_t end = path.rfind('/');
  return (end == std::string::npos ? "./" : path.substr(0, end + 1)) + name;
}

void check_processor(const Variant &variant) {
  std::ifstream file("/proc/cpuinfo");
  for (std::string line; std::getline(file, line);) {
    if (line.rfind("flags", 0) && line.rfind("Features", 0)) continue;
    std::istringstream words(line);
    std::vector<std::string> has{std::istream_iterator<std::string>(words), {}};
    for (const char *f : variant.cpu)
      if (std::find(has.begin(), has.end(), f) == has.end())
        fail("the model's CPU code uses %s, which this CPU does not have", f);
    return;
  }
}

// The error of a failed call.
std::string error_of(reflib_model *m, const Frame &f, const std::vector<const reflib_value *> &given) {
  const char *what = f.text[0] ? f.text : f.kind == FAILED_TORCH && torch().what ? torch().what() : nullptr;
  std::string step = f.step ? f.step : "the start";
  if (f.kind == FAILED_INDEX || f.kind == FAILED_ARGUMENT) {
    bool one = f.kind == FAILED_ARGUMENT && f.argument >= 0 && given[f.argument];
    return f.text + (one ? "; got " + said(*given[f.argument]) : std::string());
  }
  if (!what || !*what) what = "it failed; see stderr";
  return std::string("graph ") + m->variant->graph + ", step " + step + ": " + what;
}

}  // namespace
}  // namespace runtime

// -- load --------------------------------------------------------------------------------------------------------
reflib_model::reflib_model(const char *path, int number) : reflib_model() {
  choose_variant(number);
  check_processor(*variant);
  Scope scope(gpu, nullptr);
  load_weights(path);
  load_kernels();
  if (gpu) gpu->wait(nullptr);
  host.torch = &torch(), host.kernels = kernels.data();
  host.symbols = symbols.data(), host.constants = constants.data();
  host.python = call_python, host.load = load_kernel, host.zeros = zero_words, host.launch = launch_kernel;
  host.drop = drop_input, host.gpu = gpu ? gpu->index : 0;
  if (variant->recorded && gpu && gpu->can_capture()) recordings.reset(new Recordings(gpu));
}

// The rule of variant_for in reflib/package/architectures.py. A fatbin has all machine code of the package, so the
// driver chooses among all of it, and so does this function; its choice must be one of the exported variants.
static std::string variant_for(const Gpu &gpu) {
  int best = 0, device = gpu.capability;
  bool only_text = getenv("CUDA_FORCE_PTX_JIT") && !strcmp(getenv("CUDA_FORCE_PTX_JIT"), "1");
  for (const Code &c : tables.machine_code) {
    int made_for = c.capability;
    bool runs = made_for >= 90 ? made_for == device : made_for / 10 == device / 10 && made_for <= device;
    if (runs && c.shared <= gpu.shared && !only_text) best = std::max(best, made_for);
  }
  if (best) return "sm_" + std::to_string(best);
  const Code &text = tables.text;
  return text.capability && text.capability <= device && text.shared <= gpu.shared ? "ptx" : "";
}

void reflib_model::choose_variant(int number) {
  variant = &tables.variants[0];
  if (!strcmp(variant->arch, "cpu")) return;
  gpu = std::make_shared<Gpu>(number);
  std::string wanted = variant_for(*gpu), has;
  auto found = std::find_if(tables.variants.begin(), tables.variants.end(), [&](const Variant &a) { return a.arch == wanted; });
  for (const Variant &a : tables.variants) has += (has.empty() ? "" : ", ") + std::string(a.arch);
  if (found == tables.variants.end())
    fail("this model has no variant for this %s (sm_%d, %u KB of shared memory per thread block): it has %s; export it "
         "again from a package built with archs=[..., 'sm_%d']", gpu->name.c_str(), gpu->capability, gpu->shared / 1024, has.c_str(),
         gpu->capability);
  variant = &*found;
  if (gpu->driver_version < variant->driver)
    fail("this %s (sm_%d) needs the model's assembly text (PTX), which needs a driver for CUDA %d.%d or later; this one "
         "supports CUDA %d.%d", gpu->name.c_str(), gpu->capability, variant->driver / 1000, variant->driver % 1000 / 10,
         gpu->driver_version / 1000, gpu->driver_version % 1000 / 10);
}

// A private mapping: written pages belong to this process, other pages are shared with other readers of the file.
void reflib_model::load_weights(const char *path) {
  here.resize(tables.spans.size()), there.resize(tables.spans.size());
  if (!tables.weights.empty()) {
    std::string name = path ? path : beside(tables.weights_file);
    int f = open(name.c_str(), O_RDONLY | O_CLOEXEC);
    struct stat about;
    if (f < 0 || fstat(f, &about)) fail("cannot open the weights %s: %s", name.c_str(), strerror(errno));
    void *mapped = MAP_FAILED;
    bool right = (size_t)about.st_size == tables.weights_bytes;
    if (right) mapped = mmap(nullptr, tables.weights_bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE, f, 0);
    close(f);
    if (!right)
      fail("the weights %s have %lld bytes, this model's have %zu", name.c_str(), (long long)about.st_size,
           tables.weights_bytes);
    if (mapped == MAP_FAILED) fail("cannot map the weights %s: %s", name.c_str(), strerror(errno));
    file = (char *)mapped;
  }
  for (const Weight &w : tables.weights)
    weights.push_back(
        in_memory(span(w.span, w.on_gpu) + w.offset, w.dtype, w.on_gpu ? gpu : nullptr, w.sizes, w.strides));
  for (int i : variant->constants) constants.push_back(weights[i]);
}

// Where span `i` is; taken there if this is the first tensor in it.
char *reflib_model::span(size_t i, bool on_gpu) {
  const Span &s = tables.spans[i];
  char *&at = (on_gpu ? there : here)[i];
  if (at || !s.bytes) return at;
  if (on_gpu) {
    at = (char *)gpu->allocate(s.bytes, nullptr);
    gpu->copy(at, file + s.start, s.bytes, nullptr);
  } else if (s.start % 64) {  // kernels want whole cache lines
    copies.push_back(at = (char *)std::aligned_alloc(64, (s.bytes + 63) / 64 * 64));
    memcpy(at, file + s.start, s.bytes);
  } else {
    at = file + s.start;
  }
  return at;
}

void reflib_model::load_kernels() {
  std::map<std::string, void *> opened;
  for (const KernelRow &row : variant->kernels) {
    Kernel k{};
    k.name = row.name, k.threads = row.threads, k.shared = row.shared, k.early = row.early, k.checked = row.checked;
    kernels.push_back(k);
    if (row.library) {
      void *&library = opened[row.library];
      if (!library) {
        dlopen("libgomp.so.1", RTLD_NOW | RTLD_GLOBAL);  // threads; kernels may do without
        library = dlopen(beside(row.library).c_str(), RTLD_NOW | RTLD_LOCAL);
        if (!library) fail("cannot load the kernels: %s", dlerror());
        libraries.push_back(library);
      }
      if (!(kernels.back().function = dlsym(library, row.symbol))) fail("%s has no %s", row.library, row.symbol);
    } else if (row.image && !row.late) {
      gpu->load(kernels.back(), row);
    }
  }
  for (const char *name : variant->symbols) {
    symbols.push_back(dlsym(RTLD_DEFAULT, name));
    if (!symbols.back()) fail("the model calls the C function %s: link the library that has it", name);
  }
}

reflib_model::~reflib_model() {
  recordings.reset();
  for (Handle h : weights) torch().delete_handle(h);
  if (gpu) {
    Gpu::Current current(gpu.get());
    for (auto &w : words) old_words.push_back({w.first, w.second});
    for (auto &w : old_words) gpu->release(w.second.memory, w.second.bytes, nullptr);  // a stream may be gone
    for (size_t i = 0; i < there.size(); ++i) gpu->release(there[i], tables.spans[i].bytes, nullptr);
    for (Kernel &k : kernels) gpu->unload(k);
  }
  for (void *p : copies) std::free(p);
  for (void *l : libraries) dlclose(l);
  if (file) munmap(file, tables.weights_bytes);
}

// -- call --------------------------------------------------------------------------------------------------------
namespace {

struct Handles {  // that are deleted at the end
  std::vector<Handle> all;
  Handle keep(Handle h) { return all.push_back(h), h; }
  ~Handles() {
    for (Handle h : all) torch().delete_handle(h);
  }
};

Value value_of(const reflib_value &v, const std::shared_ptr<Gpu> &gpu, Handles &made) {
  Value out{};
  if (v.kind == REFLIB_INT) out.kind = VALUE_INT, out.integer = v.integer;
  if (v.kind != REFLIB_TENSOR) return out;
  const reflib_tensor &t = v.tensor;
  check_tensor(t, gpu);
  out.kind = VALUE_TENSOR;
  out.tensor = made.keep(in_memory(t.data, t.dtype, t.device < 0 ? nullptr : gpu, sizes_of(t), strides_of(t)));
  return out;
}

// What input `i` of the wrapper is called, and the bytes that it is in.
struct Input {
  std::string name;
  char *first, *end;
  Input(const Value &v, const Slot &s) {
    reflib_tensor t = described(v.tensor).tensor;
    name = s.place == WEIGHT ? std::string("weight ") + tables.weights[s.which].name
                             : "argument " + std::to_string(s.which) + " (" + tables.arguments[s.which].name + ")";
    first = (char *)t.data, end = first + bytes_of(t.dim, t.sizes, t.strides, t.dtype);
  }
};

// Fails if another input is in the memory of input `written`, and one of them is the caller's. (Addresses of the CPU's
// and of GPUs differ.)
void check_apart(const std::vector<Value> &in, size_t written) {
  Input w(in[written], tables.inputs[written]);
  for (size_t i = 0; i < in.size(); ++i) {
    bool weights = tables.inputs[i].place == WEIGHT && tables.inputs[written].place == WEIGHT;
    if (i == written || weights || in[i].kind != VALUE_TENSOR) continue;
    Input other(in[i], tables.inputs[i]);
    if (w.first < w.end && other.first < other.end && w.first < other.end && other.first < w.end)
      fail("%s is written to and shares memory with %s: copy it first", w.name.c_str(), other.name.c_str());
  }
}

// What a recording is of: the stream, and the caller's values.
Recordings::Call call_of(void *stream, const std::vector<const reflib_value *> &given) {
  Recordings::Call all{(int64_t)stream};
  for (const reflib_value *v : given) {
    if (!v) continue;
    const reflib_tensor &t = v->tensor;
    if (v->kind != REFLIB_TENSOR) {
      all.insert(all.end(), {v->kind, v->integer});
      continue;
    }
    all.insert(all.end(), {(int64_t)t.data, t.dtype, t.device, t.dim});
    all.insert(all.end(), t.sizes, t.sizes + t.dim);
    all.insert(all.end(), t.strides, t.strides + t.dim);
  }
  return all;
}

void run(reflib_model *m, void *stream, const reflib_value *given, reflib_value *outputs) {
  Scope scope(m->gpu, stream);
  Handles made;
  std::vector<Value> in(tables.inputs.size()), out(tables.outputs);
  std::vector<const reflib_value *> callers(in.size());
  for (size_t i = 0; i < in.size(); ++i) {
    const Slot &s = tables.inputs[i];
    in[i].kind = VALUE_NONE;
    if (s.place == WEIGHT) in[i].kind = VALUE_TENSOR, in[i].tensor = m->weights[s.which];
    if (s.place != CALLER) continue;
    callers[i] = &given[s.which];
    try {
      in[i] = value_of(given[s.which], m->gpu, made);
    } catch (const Error &e) {
      fail("argument %zu (%s): %s", i, tables.arguments[s.which].name, e.text.c_str());
    }
  }
  for (size_t w : tables.written) check_apart(in, w);
  Frame frame{};
  int32_t rc = 0;
  auto recorded = [&](void *lane, Value *results) {
    Scope on_lane(m->gpu, lane);
    Frame own{};
    return m->variant->call(&m->host, &own, in.data(), results);
  };
  Recordings::Call call;
  if (m->recordings) call = call_of(stream, callers);
  if (!m->recordings || !m->recordings->run(stream, call, recorded, out)) {
    rc = m->variant->call(&m->host, &frame, in.data(), out.data());
    if (m->recordings && !rc) m->recordings->ran(call);
  }
  for (Value &v : out)
    if (v.kind == VALUE_TENSOR) made.keep(v.tensor);
  if (rc) fail("%s", error_of(m, frame, callers).c_str());
  std::vector<reflib_value> results;  // nothing is the caller's until all has gone well
  for (const Value &v : out) {
    if (v.kind == VALUE_TENSOR) results.push_back(described(v.tensor));
    else if (v.kind == VALUE_INT) results.push_back(integer(v.integer));
    else if (v.kind == VALUE_BOOL) results.push_back(truth(v.integer));
    else if (v.kind == VALUE_FLOAT) results.push_back(number(v.number));
    else if (v.kind == VALUE_OBJECT) results.push_back(m->variant->objects[v.object]);
    else results.push_back(reflib_value{});
  }
  std::copy(results.begin(), results.end(), outputs);
  for (const reflib_value &v : results)
    if (v.kind == REFLIB_TENSOR) made.all.erase(std::find(made.all.begin(), made.all.end(), (Handle)v.tensor.owner));
}

}  // namespace

// -- model.h -----------------------------------------------------------------------------------------------------
int32_t reflib_load(reflib_model **model, const char *weights, int32_t gpu) {
  return caught([&] { *model = nullptr, torch(), *model = new reflib_model(weights, gpu); });
}

int32_t reflib_run(reflib_model *m, void *stream, const reflib_value *inputs, int32_t input_count, reflib_value *outputs,
                   int32_t output_count) {
  return caught([&] {
    int32_t takes = reflib_input_count(m), gives = reflib_output_count(m);
    if (input_count != takes || output_count != gives)
      fail("the model takes %d inputs and gives %d outputs; called with %d and %d", takes, gives, input_count,
           output_count);
    for (int i = 0; i < gives; ++i) outputs[i].kind = REFLIB_NONE;
    run(m, stream, inputs, outputs);
  });
}

void reflib_free(reflib_value *v) {
  if (!v) return;
  if (v->kind == REFLIB_TENSOR && v->tensor.owner) torch().delete_handle((Handle)v->tensor.owner);
  *v = {};
}

void reflib_unload(reflib_model *m) { delete m; }
const char *reflib_error(void) { return last_error.c_str(); }

int32_t reflib_input_count(const reflib_model *) { return (int32_t)tables.arguments.size(); }
int32_t reflib_output_count(const reflib_model *) { return tables.outputs; }

reflib_input reflib_about_input(const reflib_model *m, int32_t i) {
  reflib_input about{};
  if (i < 0 || i >= reflib_input_count(m)) return about;
  const Argument &a = tables.arguments[i];
  about.name = a.name, about.example.kind = a.kind;
  if (a.kind == REFLIB_INT) {
    about.example.integer = a.sizes[0];
  } else {
    reflib_tensor &t = about.example.tensor;
    t.dtype = a.dtype, t.device = a.on_gpu && m->gpu ? m->gpu->index : REFLIB_CPU, t.dim = (int32_t)a.sizes.size();
    t.sizes = a.sizes.data(), t.strides = a.strides.data();
  }
  return about;
}

const char *reflib_variant(const reflib_model *m) { return m->variant->arch; }

int32_t reflib_new(reflib_model *m, void *stream, reflib_value *v) {
  return caught([&] {
    reflib_tensor &t = v->tensor;
    if (v->kind != REFLIB_TENSOR) fail("cannot make a tensor: it says that it is %s", said(*v).c_str());
    named("cannot make a tensor", [&] { check_tensor(t, m->gpu, true); });
    Scope scope(m->gpu, stream);
    Handle h;
    if (torch().empty_strided(t.dim, t.sizes, t.strides, t.dtype, t.device < 0 ? 0 : 1, t.device, &h))
      fail("cannot make a tensor: %s", torch().what ? torch().what() : "see stderr");
    *v = described(h);
  });
}

int32_t reflib_copy(reflib_model *m, void *stream, const reflib_value *to, const reflib_value *from) {
  return caught([&] {
    for (const reflib_value *v : {to, from})
      if (v->kind == REFLIB_TENSOR) named("cannot copy", [&] { check_tensor(v->tensor, m->gpu); });
    Scope scope(m->gpu, stream);
    copy(m->gpu, stream, *to, *from);
    if (m->gpu) m->gpu->wait(stream);
  });
}
