// Calls the model once and prints its results.
//
//   example [--gpu N] [--weights FILE] [--input FILE[:SIZES[:DTYPE[:STRIDES]]]]... [--output FILE]...
//
// Inputs are raw bytes, as numpy's tofile writes them, for instance x.bin:8,16:float32; without SIZES and DTYPE they
// are as the model was exported. An input that is an int is the number itself. Inputs that are not given are generated.
// Outputs are raw bytes, contiguous.
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <fstream>
#include <sstream>
#include <string>
#include <vector>

#include "model.h"

struct Host {  // a tensor in this program's memory
  std::vector<char> bytes;
  std::vector<int64_t> sizes, strides;
  int32_t dtype = 0;
  reflib_value value() {
    reflib_value v{};
    v.kind = REFLIB_TENSOR;
    v.tensor.data = bytes.data(), v.tensor.dtype = dtype, v.tensor.device = REFLIB_CPU;
    v.tensor.dim = (int32_t)sizes.size(), v.tensor.sizes = sizes.data(), v.tensor.strides = strides.data();
    return v;
  }
};

static int failed(const char *what) {
  fprintf(stderr, "%s: %s\n", what, reflib_error());
  return 1;
}

static std::vector<int64_t> contiguous(const std::vector<int64_t> &sizes) {
  std::vector<int64_t> strides(sizes.size());
  int64_t n = 1;
  for (size_t d = sizes.size(); d--; n *= sizes[d] ? sizes[d] : 1) strides[d] = n;
  return strides;
}

static int wrong(const char *what, const std::string &said) {
  fprintf(stderr, "%s: %s\n", what, said.c_str());
  exit(2);
}

static size_t bytes_of(const Host &t) {
  int64_t last = 1;
  for (size_t d = 0; d < t.sizes.size(); ++d) {
    if (t.sizes[d] == 0) return 0;
    last += (t.sizes[d] - 1) * t.strides[d];
  }
  return last * reflib_dtype_size(t.dtype);
}

// Values that suit any model: a sine wave for floats, 0 and 1 for other dtypes.
static void fill(Host &t) {
  size_t n = t.bytes.size() / reflib_dtype_size(t.dtype);
  for (size_t i = 0; i < n; ++i) {
    float wave = std::sin(0.1f * (float)i);
    char *at = t.bytes.data() + i * reflib_dtype_size(t.dtype);
    if (t.dtype == REFLIB_FLOAT32) memcpy(at, &wave, 4);
    else if (t.dtype == REFLIB_BFLOAT16) memcpy(at, (char *)&wave + 2, 2);
    else if (t.dtype == REFLIB_FLOAT16) memcpy(at, i % 2 ? "\0\x3c" : "\0\0", 2);
    else if (t.dtype == REFLIB_FLOAT64) { double d = wave; memcpy(at, &d, 8); }
    else if (reflib_dtype_name(t.dtype)[0] != 'f') *at = (char)(i % 2);
  }
}

static std::vector<int64_t> numbers(const std::string &text) {
  std::vector<int64_t> out;
  std::istringstream words(text);
  for (std::string w; std::getline(words, w, ',');) {
    if (w.empty() || w.size() > 12 || w.find_first_not_of("0123456789") != w.npos) wrong("no size, no stride", w);
    out.push_back(atoll(w.c_str()));
  }
  return out;
}

static std::vector<std::string> split(const std::string &text) {
  std::vector<std::string> out;
  std::istringstream words(text);
  for (std::string w; std::getline(words, w, ':');) out.push_back(w);
  return out;
}

// The tensor described on the command line ("": a generated one).
static Host tensor(const reflib_tensor &example, const std::string &said) {
  std::vector<std::string> parts = split(said);
  Host t;
  t.dtype = example.dtype;
  t.sizes.assign(example.sizes, example.sizes + example.dim);
  t.strides.assign(example.strides, example.strides + example.dim);
  if (parts.size() > 1) t.sizes = numbers(parts[1]), t.strides = contiguous(t.sizes);
  if (parts.size() > 2) t.dtype = -1;
  for (int32_t d = 0; parts.size() > 2 && d < 100; ++d)
    if (reflib_dtype_name(d) && parts[2] == reflib_dtype_name(d)) t.dtype = d;
  if (t.dtype < 0) wrong("no dtype", parts[2]);
  if (parts.size() > 3) t.strides = numbers(parts[3]);
  if (t.strides.size() != t.sizes.size()) wrong("other strides than sizes", said);
  t.bytes.resize(bytes_of(t));
  if (said.empty()) return fill(t), t;
  std::ifstream file(parts[0], std::ios::binary);
  file.read(t.bytes.data(), (std::streamsize)t.bytes.size());
  if (!file) fprintf(stderr, "%s does not have %zu bytes\n", parts[0].c_str(), t.bytes.size()), exit(1);
  return t;
}

static void print_some(const Host &t) {
  printf("  ");
  for (size_t i = 0; i < 6; ++i) {
    const char *at = t.bytes.data() + i * reflib_dtype_size(t.dtype);
    if (at >= t.bytes.data() + t.bytes.size()) break;
    if (t.dtype == REFLIB_FLOAT32) printf(" %g", *(const float *)at);
    else if (t.dtype == REFLIB_FLOAT64) printf(" %g", *(const double *)at);
    else if (t.dtype == REFLIB_INT64) printf(" %lld", (long long)*(const int64_t *)at);
    else if (t.dtype == REFLIB_INT32) printf(" %d", *(const int32_t *)at);
    else if (t.dtype == REFLIB_BOOL) printf(" %d", *at);
    else if (t.dtype == REFLIB_BFLOAT16) { float f = 0; memcpy((char *)&f + 2, at, 2); printf(" %g", f); }
    else break;
  }
  printf("\n");
}

int main(int count, char **words) {
  int gpu = 0;
  const char *weights = nullptr;
  std::vector<std::string> given, files;
  for (int i = 1; i < count; ++i) {
    std::string w = words[i];
    if (i + 1 == count) return fprintf(stderr, "%s: takes a value\n", words[i]), 2;
    if (w == "--gpu") gpu = atoi(words[++i]);
    else if (w == "--weights") weights = words[++i];
    else if (w == "--input") given.push_back(words[++i]);
    else if (w == "--output") files.push_back(words[++i]);
    else return fprintf(stderr, "%s: takes --gpu, --weights, --input, --output\n", words[i]), 2;
  }
  reflib_model *model;
  if (reflib_load(&model, weights, gpu)) return failed("cannot load the model");
  int32_t n = reflib_input_count(model), m = reflib_output_count(model);
  given.resize(n);
  printf("variant %s\n", reflib_variant(model));

  std::vector<Host> mine(n);
  std::vector<reflib_value> in(n), out(m);
  for (int i = 0; i < n; ++i) {
    reflib_input about = reflib_about_input(model, i);
    in[i] = about.example;
    if (about.example.kind != REFLIB_TENSOR) {
      if (!given[i].empty()) in[i].integer = atoll(given[i].c_str());
      continue;
    }
    mine[i] = tensor(about.example.tensor, given[i]);
    in[i] = mine[i].value();
    if (about.example.tensor.device == REFLIB_CPU) continue;
    in[i].tensor.device = about.example.tensor.device;
    reflib_value here = mine[i].value();
    if (reflib_new(model, nullptr, &in[i]) || reflib_copy(model, nullptr, &in[i], &here)) return failed(about.name);
  }
  if (reflib_run(model, nullptr, in.data(), n, out.data(), m)) return failed("the call failed");

  for (int i = 0; i < m; ++i) {
    if (out[i].kind == REFLIB_INT) printf("output %d: int %lld\n", i, (long long)out[i].integer);
    if (out[i].kind == REFLIB_FLOAT) printf("output %d: float %.17g\n", i, out[i].number);
    if (out[i].kind == REFLIB_TRUTH) printf("output %d: %s\n", i, out[i].integer ? "true" : "false");
    if (out[i].kind == REFLIB_TEXT) printf("output %d: text %s\n", i, out[i].text);
    if (out[i].kind == REFLIB_NONE) printf("output %d: none\n", i);
    if (out[i].kind != REFLIB_TENSOR) continue;
    const reflib_tensor &t = out[i].tensor;
    Host host;
    host.dtype = t.dtype, host.sizes.assign(t.sizes, t.sizes + t.dim), host.strides = contiguous(host.sizes);
    host.bytes.resize(bytes_of(host));
    reflib_value here = host.value();
    if (reflib_copy(model, nullptr, &here, &out[i])) return failed("cannot copy an output");
    printf("output %d: %s [", i, reflib_dtype_name(t.dtype));
    for (int d = 0; d < t.dim; ++d) printf("%s%lld", d ? ", " : "", (long long)t.sizes[d]);
    printf("]\n");
    print_some(host);
    if ((size_t)i < files.size()) std::ofstream(files[i], std::ios::binary).write(host.bytes.data(), host.bytes.size());
  }
  for (reflib_value &v : out) reflib_free(&v);
  for (reflib_value &v : in) reflib_free(&v);
  reflib_unload(model);
}
