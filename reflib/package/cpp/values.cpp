// The caller's tensors: what they must be, how they are described, copied.
#include <algorithm>
#include <cstring>

#include "runtime.h"

namespace {

const struct {
  int32_t dtype;
  const char *name;
  size_t size;
} dtypes[] = {
    {REFLIB_UINT8, "uint8", 1}, {REFLIB_INT8, "int8", 1}, {REFLIB_INT16, "int16", 2}, {REFLIB_INT32, "int32", 4},
    {REFLIB_INT64, "int64", 8}, {REFLIB_FLOAT16, "float16", 2}, {REFLIB_FLOAT32, "float32", 4},
    {REFLIB_FLOAT64, "float64", 8}, {REFLIB_COMPLEX64, "complex64", 8}, {REFLIB_COMPLEX128, "complex128", 16},
    {REFLIB_BOOL, "bool", 1}, {REFLIB_BFLOAT16, "bfloat16", 2}, {REFLIB_FLOAT8_E5M2, "float8_e5m2", 1},
    {REFLIB_FLOAT8_E4M3FN, "float8_e4m3fn", 1}, {REFLIB_FLOAT8_E5M2FNUZ, "float8_e5m2fnuz", 1},
    {REFLIB_FLOAT8_E4M3FNUZ, "float8_e4m3fnuz", 1}, {REFLIB_UINT16, "uint16", 2}, {REFLIB_UINT32, "uint32", 4},
    {REFLIB_UINT64, "uint64", 8}};

}  // namespace

const char *reflib_dtype_name(int32_t dtype) {
  for (auto &d : dtypes)
    if (d.dtype == dtype) return d.name;
  return nullptr;
}

size_t reflib_dtype_size(int32_t dtype) {
  for (auto &d : dtypes)
    if (d.dtype == dtype) return d.size;
  return 0;
}

namespace runtime {

size_t bytes_of(int64_t dim, const int64_t *sizes, const int64_t *strides, int32_t dtype) {
  size_t item = reflib_dtype_size(dtype);
  if (!item) fail("there is no dtype %d", dtype);
  if (dim < 0 || dim > 64) fail("%lld dimensions; there can be 0 to 64", (long long)dim);
  if (dim && (!sizes || !strides)) fail("no sizes or no strides");
  int64_t elements = 1, step, bytes;
  bool none = false, large = false;
  for (int64_t d = 0; d < dim; ++d) {
    if (sizes[d] < 0) fail("size %lld in dimension %lld", (long long)sizes[d], (long long)d);
    if (strides[d] < 0) fail("stride %lld in dimension %lld", (long long)strides[d], (long long)d);
    none |= sizes[d] == 0;
    large |= __builtin_mul_overflow(sizes[d] - 1, strides[d], &step);
    large |= __builtin_add_overflow(elements, step, &elements);
  }
  if (none) return 0;
  if (large || __builtin_mul_overflow(elements, (int64_t)item, &bytes)) fail("2^63 bytes or more");
  return (size_t)bytes;
}

std::vector<int64_t> sizes_of(const reflib_tensor &t) { return {t.sizes, t.sizes + t.dim}; }
std::vector<int64_t> strides_of(const reflib_tensor &t) { return {t.strides, t.strides + t.dim}; }

static void check_handle(int32_t rc) {
  if (rc) fail("the properties of a tensor cannot be read");
}

reflib_value described(Handle h) {
  const Torch &t = torch();
  reflib_value v{};
  v.kind = REFLIB_TENSOR;
  int64_t dim, *sizes, *strides;
  int32_t type, index = -1;
  check_handle(t.data_ptr(h, &v.tensor.data) || t.dtype(h, &v.tensor.dtype) || t.dim(h, &dim) || t.sizes(h, &sizes) ||
               t.strides(h, &strides) || t.device_type(h, &type));
  if (type) check_handle(t.device_index(h, &index));
  v.tensor.device = type ? index : REFLIB_CPU, v.tensor.dim = (int32_t)dim;
  v.tensor.sizes = sizes, v.tensor.strides = strides, v.tensor.owner = h;
  return v;
}

void check_tensor(const reflib_tensor &t, const std::shared_ptr<Gpu> &gpu, bool is_new) {
  if (bytes_of(t.dim, t.sizes, t.strides, t.dtype) && !t.data && !is_new) fail("it has no data");
  if (t.device >= 0 && (!gpu || gpu->index != t.device)) fail("it is on GPU %d, where the model is not", t.device);
}

std::string said(const reflib_value &v) {
  if (v.kind != REFLIB_TENSOR) return v.kind == REFLIB_INT ? "an int" : v.kind == REFLIB_FLOAT ? "a float" :
                                      v.kind == REFLIB_TEXT ? "a text" :
                                      v.kind == REFLIB_TRUTH ? "a truth value" : "nothing";
  const reflib_tensor &t = v.tensor;
  auto list = [&](const int64_t *a) {
    std::string s = "[";
    for (int d = 0; d < t.dim; ++d) s += (d ? ", " : "") + std::to_string(a[d]);
    return s + "]";
  };
  const char *name = reflib_dtype_name(t.dtype);
  std::string where = t.device < 0 ? "cpu" : "cuda:" + std::to_string(t.device);
  return (name ? name : "no dtype") + (" " + list(t.sizes)) + ", strides " + list(t.strides) + ", on " + where;
}

// Copies elements in as few pieces as possible: runs of elements that are contiguous in both tensors.
template <class Move>
static void copy_elements(const reflib_tensor &to, const reflib_tensor &from, Move move) {
  size_t item = reflib_dtype_size(to.dtype);
  std::vector<int> order;
  for (int d = 0; d < to.dim; ++d) {
    if (to.sizes[d] == 0) return;
    if (to.sizes[d] > 1) order.push_back(d);
  }
  std::stable_sort(order.begin(), order.end(), [&](int a, int b) { return to.strides[a] > to.strides[b]; });
  int64_t run = 1;
  while (!order.empty() && to.strides[order.back()] == run && from.strides[order.back()] == run)
    run *= to.sizes[order.back()], order.pop_back();
  std::vector<int64_t> at(order.size(), 0);
  for (;;) {
    int64_t a = 0, b = 0;
    for (size_t i = 0; i < order.size(); ++i) a += at[i] * to.strides[order[i]], b += at[i] * from.strides[order[i]];
    move((char *)to.data + a * (int64_t)item, (const char *)from.data + b * (int64_t)item, run * item);
    int i = (int)order.size() - 1;
    while (i >= 0 && ++at[i] == to.sizes[order[i]]) at[i--] = 0;
    if (i < 0) return;
  }
}

void copy(const std::shared_ptr<Gpu> &gpu, void *stream, const reflib_value &to, const reflib_value &from) {
  const reflib_tensor &a = to.tensor, &b = from.tensor;
  if (to.kind != REFLIB_TENSOR || from.kind != REFLIB_TENSOR || a.dtype != b.dtype || sizes_of(a) != sizes_of(b))
    fail("cannot copy %s to %s: sizes and dtype must be equal", said(from).c_str(), said(to).c_str());
  if (a.device < 0 && b.device < 0)
    copy_elements(a, b, [](char *p, const char *q, size_t n) { memmove(p, q, n); });
  else
    copy_elements(a, b, [&](char *p, const char *q, size_t n) { gpu->copy(p, q, n, stream); });
}

}  // namespace runtime
