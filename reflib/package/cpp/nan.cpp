// The option check_nan: after each kernel and call, are the floating-point values that it wrote numbers? By the rules of
// reflib/wrap/bad_values.py: NaN is reported always; infinities where what was read has none, and the step has none among
// its constants.
#include <cstring>

#include "runtime.h"

namespace runtime {
namespace {

enum Kind { FINE, INFINITE, NAN_ };
const char *const kinds[] = {"", "infinity", "NaN"};

// Of a value with so many bits of mantissa, and of exponent before them.
Kind kind_of(uint64_t bits, int mantissa, int exponent) {
  uint64_t ones = (1ull << exponent) - 1;
  if ((bits >> mantissa & ones) != ones) return FINE;
  return bits & ((1ull << mantissa) - 1) ? NAN_ : INFINITE;
}

Kind kind_of(const char *at, int32_t dtype) {
  auto bits = [&](size_t bytes) {
    uint64_t b = 0;
    memcpy(&b, at, bytes);
    return b;
  };
  auto both = [&](size_t bytes, int mantissa, int exponent) {  // of a complex number
    Kind real = kind_of(bits(bytes), mantissa, exponent);
    at += bytes;
    return std::max(real, kind_of(bits(bytes), mantissa, exponent));
  };
  switch (dtype) {
    case REFLIB_FLOAT16: return kind_of(bits(2), 10, 5);
    case REFLIB_BFLOAT16: return kind_of(bits(2), 7, 8);
    case REFLIB_FLOAT32: return kind_of(bits(4), 23, 8);
    case REFLIB_FLOAT64: return kind_of(bits(8), 52, 11);
    case REFLIB_COMPLEX64: return both(4, 23, 8);
    case REFLIB_COMPLEX128: return both(8, 52, 11);
    case REFLIB_FLOAT8_E5M2: return kind_of(bits(1), 2, 5);
    case REFLIB_FLOAT8_E4M3FN: return (bits(1) & 0x7f) == 0x7f ? NAN_ : FINE;
    case REFLIB_FLOAT8_E5M2FNUZ:
    case REFLIB_FLOAT8_E4M3FNUZ: return bits(1) == 0x80 ? NAN_ : FINE;
    default: return FINE;  // no floating-point numbers
  }
}

// The worst that a tensor has, and where it is first.
struct Found {
  Kind kind = FINE;
  std::vector<int64_t> first, sizes;

  Found(const std::shared_ptr<Gpu> &gpu, void *stream, Handle h) {
    reflib_value v = described(h), here{};
    reflib_tensor &t = v.tensor;
    sizes = sizes_of(t);
    int64_t count = 1;
    std::vector<int64_t> strides(t.dim);
    for (int d = t.dim - 1; d >= 0; --d) strides[d] = count, count *= t.sizes[d];
    size_t item = reflib_dtype_size(t.dtype);
    std::vector<char> data(count * item);
    here.kind = REFLIB_TENSOR;
    here.tensor = {data.data(), t.dtype, REFLIB_CPU, t.dim, sizes.data(), strides.data(), nullptr};
    if (count) copy(gpu, stream, here, v);
    if (gpu) gpu->wait(stream);
    int64_t at = 0;
    for (int64_t i = 0; i < count && kind != NAN_; ++i) {
      Kind k = kind_of(data.data() + i * item, t.dtype);
      if (k > kind) kind = k, at = i;
    }
    for (int d = 0; kind && d < t.dim; ++d) first.push_back(at / strides[d] % sizes[d]);
  }

  std::string place() const { return "[" + joined(first) + "]"; }
  std::string shape() const { return "(" + joined(sizes) + (sizes.size() == 1 ? ",)" : ")"); }
  static std::string joined(const std::vector<int64_t> &all) {
    std::string s;
    for (int64_t n : all) s += (s.empty() ? "" : ", ") + std::to_string(n);
    return s;
  }
};

}  // namespace

std::string bad_value(const NanCheck &check, const std::shared_ptr<Gpu> &gpu, void *stream, const Value *args) {
  std::vector<Found> read;
  for (size_t i = check.wrote; i < check.names.size(); ++i) read.emplace_back(gpu, stream, args[i].tensor);
  for (size_t i = 0; i < check.wrote; ++i) {
    Found wrote(gpu, stream, args[i].tensor);
    bool was = false;
    for (const Found &r : read) was |= r.kind != FINE;
    if (!wrote.kind || (wrote.kind == INFINITE && (was || check.infinite))) continue;
    std::string text = std::string("check_nan: ") + check.what + " wrote " + kinds[wrote.kind] + " into " +
                       check.names[i] + " " + wrote.shape() + ", first at " + wrote.place();
    was = false;
    for (size_t k = 0; k < read.size(); ++k) {
      if (read[k].kind != wrote.kind && read[k].kind != NAN_) continue;
      was = true;
      text += std::string("\n  it was there before: ") + check.names[check.wrote + k] + ", which this reads, has " +
              kinds[read[k].kind] + " first at " + read[k].place();
    }
    if (!was) text += std::string("\n  what it only reads has no ") + kinds[wrote.kind];
    return text + check.origins;
  }
  return "";
}

}  // namespace runtime
