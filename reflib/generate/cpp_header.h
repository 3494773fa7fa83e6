// What generated kernels are written with. Small on purpose: it is parsed with every library.
#include <stdint.h>

typedef struct { uint16_t bits; } float16;
typedef struct { uint16_t bits; } bfloat16;

namespace op {

template <class To, class From> static inline To bit_cast(From x) {
  static_assert(sizeof(To) == sizeof(From), "");
  To y;
  __builtin_memcpy(&y, &x, sizeof y);
  return y;
}
template <class T> struct is_float { static constexpr bool value = false; };
template <> struct is_float<float> { static constexpr bool value = true; };
template <> struct is_float<double> { static constexpr bool value = true; };

// ---- half precision: kept in memory only -------------------------------------------------------
static inline float widen(bfloat16 h) { return bit_cast<float>((uint32_t)h.bits << 16); }
static inline float widen(float16 h) {
  // Shift exponent and fraction into place; 2^112 repairs the exponent's bias, and denormals on the way.
  const uint32_t bits = (uint32_t)(int16_t)h.bits << 13 & 0x8fffffff;
  const uint32_t all_ones = (bits & 0x0f800000) == 0x0f800000 ? 0x7f800000 : 0;  // infinity or NaN
  return bit_cast<float>(bit_cast<uint32_t>(bit_cast<float>(bits) * 0x1p112f) | all_ones);
}
static inline bfloat16 to_bfloat16(float x) {
  const uint32_t bits = bit_cast<uint32_t>(x);
  const uint32_t rounded = (bits + 0x7fff + ((bits >> 16) & 1)) >> 16;  // to nearest, ties to even
  return bfloat16{(uint16_t)(x != x ? 0x7fc0 : rounded)};
}
static inline float16 to_float16(float x) {
  const uint32_t all = bit_cast<uint32_t>(x), sign = (all >> 16) & 0x8000, bits = all & 0x7fffffff;
  // Normal results: rebias, round to nearest, ties to even. A carry walks into the exponent, up to infinity.
  const uint32_t normal = (bits - 0x38000000 + 0xfff + ((bits >> 13) & 1)) >> 13;
  // Denormal results: adding 0.5 makes the float unit round at the place where float16's last bit is.
  const uint32_t small = bit_cast<uint32_t>(bit_cast<float>(bits) + 0.5f) - 0x3f000000;
  uint32_t half = bits < 0x38800000 ? small : normal;
  half = bits >= 0x47800000 ? 0x7c00 : half;
  half = bits > 0x7f800000 ? 0x7e00 : half;
  return float16{(uint16_t)(half | sign)};
}
static inline float to_f16(float x) { return widen(to_float16(x)); }
static inline float to_bf16(float x) { return widen(to_bfloat16(x)); }
static inline double to_f16(double x) { return to_f16((float)x); }
static inline double to_bf16(double x) { return to_bf16((float)x); }

// ---- choosing: NaN wins ------------------------------------------------------------------------
// A sum that is an operand of ?:. With AVX-512 g++ 12 makes one masked addition of both; where the mask is then found to
// be all ones (parts of a cat in a short loop) and the other operand is a product, it contracts the product with the
// sum's first term instead: wrong numbers, or an internal error.
#if defined(__has_builtin)
#if __has_builtin(__builtin_assoc_barrier)
#define REFLIB_APART(x) __builtin_assoc_barrier(x)
#endif
#endif
#ifndef REFLIB_APART
#define REFLIB_APART(x) (x)
#endif
template <class T> static inline T chosen(T x) { return REFLIB_APART(x); }
template <class T> static inline T maximum(T a, T b) { return (a > b) | (a != a) ? a : b; }
template <class T> static inline T minimum(T a, T b) { return (a < b) | (a != a) ? a : b; }
template <class T> static inline T max(T a, T b) { return a > b ? a : b; }
template <class T> static inline T min(T a, T b) { return a < b ? a : b; }
// width of a tile of columns: equal shares for the threads, whole vectors
static inline int64_t tile_width(int64_t columns, int64_t threads, int64_t least, int64_t most) {
  const int64_t share = (columns + threads - 1) / threads, tiles = (share + most - 1) / most;
  const int64_t width = ((share + tiles - 1) / tiles + 15) / 16 * 16;
  return min<int64_t>(most, width < least ? least : width);
}

// ---- floats ------------------------------------------------------------------------------------
static inline float floor(float x) { return __builtin_floorf(x); }
static inline double floor(double x) { return __builtin_floor(x); }
static inline float ceil(float x) { return __builtin_ceilf(x); }
static inline double ceil(double x) { return __builtin_ceil(x); }
static inline float trunc(float x) { return __builtin_truncf(x); }
static inline double trunc(double x) { return __builtin_trunc(x); }
static inline float round(float x) { return __builtin_rintf(x); }
static inline double round(double x) { return __builtin_rint(x); }
static inline float sqrt(float x) { return __builtin_sqrtf(x); }
static inline double sqrt(double x) { return __builtin_sqrt(x); }
template <class T> static inline T rsqrt(T x) { return 1 / sqrt(x); }
static inline float copysign(float a, float b) { return __builtin_copysignf(a, b); }
static inline double copysign(double a, double b) { return __builtin_copysign(a, b); }
static inline bool signbit(float x) { return bit_cast<int32_t>(x) < 0; }
static inline bool signbit(double x) { return bit_cast<int64_t>(x) < 0; }
template <class T> static inline auto from_bits(T x) {
  if constexpr (sizeof(T) == 4) return bit_cast<float>(x);
  else return bit_cast<double>(x);
}
static inline int32_t to_bits(float x) { return bit_cast<int32_t>(x); }
static inline int64_t to_bits(double x) { return bit_cast<int64_t>(x); }
template <class T> static inline bool isnan(T x) { return x != x; }
static inline bool isinf(float x) { return __builtin_fabsf(x) == __builtin_inff(); }
static inline bool isinf(double x) { return __builtin_fabs(x) == __builtin_inf(); }
static inline float fmod(float a, float b) { return __builtin_fmodf(a, b); }
static inline double fmod(double a, double b) { return __builtin_fmod(a, b); }

static inline float abs(float x) { return __builtin_fabsf(x); }
static inline double abs(double x) { return __builtin_fabs(x); }
template <class T> static inline T abs(T x) { return x < 0 ? (T)-x : x; }

// ---- integers: dividing by zero gives zero, and dividing the least integer by -1 wraps ---------
template <class T> static inline T truncdiv(T a, T b) { return b == 0 ? 0 : b == (T)-1 && (T)-1 < 0 ? (T)(0 - a) : (T)(a / b); }
template <class T> static inline T fmod(T a, T b) { return b == 0 || (b == (T)-1 && (T)-1 < 0) ? 0 : (T)(a % b); }
template <class T> static inline T remainder(T a, T b) {
  const T r = fmod(a, b);
  return r != 0 && (r < 0) != (b < 0) ? (T)(r + b) : r;
}
template <class T> static inline T floordiv(T a, T b) {
  if constexpr (is_float<T>::value) {  // Python's rule, as torch has it
    const T rest = fmod(a, b);
    T quotient = (a - rest) / b;
    quotient = rest != 0 && (rest < 0) != (b < 0) ? quotient - 1 : quotient;
    T down = floor(quotient);
    down = quotient - down > (T)0.5 ? down + 1 : down;
    down = quotient == 0 ? copysign((T)0, a / b) : down;
    return b == 0 ? a / b : down;
  } else {
    const T q = truncdiv(a, b);
    return b != 0 && (T)(q * b) != a && (a < 0) != (b < 0) ? (T)(q - 1) : q;
  }
}
// A shift by a negative amount, or by all bits or more, shifts everything out.
template <class T> static inline T shl(T a, T b) {
  const bool out = b < 0 || (uint64_t)b >= sizeof(T) * 8;
  return out ? 0 : (T)((uint64_t)a << b);
}
template <class T> static inline T shr(T a, T b) {
  constexpr int top = sizeof(T) * 8 - ((T)-1 < 0);
  const bool out = b < 0 || b >= (T)top;
  return (T)-1 < 0 ? (T)(a >> (out ? top : (int)b)) : out ? 0 : (T)(a >> b);
}
// Random words: Philox 4x32-10. ir/random.py says what it is.
template <class T> static inline int32_t philox(T seed, T stream, T index) {
  const uint64_t counter = (uint64_t)(index >> 2);
  uint32_t a = (uint32_t)counter, b = (uint32_t)(counter >> 32), c = (uint32_t)stream, d = 0;
  uint32_t k = (uint32_t)seed, l = (uint32_t)((uint64_t)seed >> 32);
  for (int round = 0; round < 10; ++round) {
    const uint64_t p = (uint64_t)a * 0xD2511F53, q = (uint64_t)c * 0xCD9E8D57;
    a = (uint32_t)(q >> 32) ^ b ^ k;
    b = (uint32_t)q;
    c = (uint32_t)(p >> 32) ^ d ^ l;
    d = (uint32_t)p;
    k += 0x9E3779B9;
    l += 0xBB67AE85;
  }
  const int word = index & 3;
  return (int32_t)(word == 0 ? a : word == 1 ? b : word == 2 ? c : d);
}
// As x86 does it: what does not fit becomes the least integer of the width that the conversion goes through.
template <class T> static inline T to_integer(float x) {
  return sizeof(T) == 8 ? (T)(int64_t)x : (T)(int32_t)x;
}
template <class T> static inline T to_integer(double x) {
  return sizeof(T) == 8 ? (T)(int64_t)x : (T)(int32_t)x;
}

// ---- functions from libm -------------------------------------------------------------------------
// glibc's libmvec has the same functions for whole vectors; told so, the compiler calls those in simd loops.
#ifdef REFLIB_LIBMVEC
#define VECTOR_TOO __attribute__((simd("notinbranch"), const, nothrow))
#else
#define VECTOR_TOO __attribute__((const, nothrow))
#endif
#define FROM_LIBM(name) \
  static inline float name(float x) { return __builtin_##name##f(x); } \
  static inline double name(double x) { return __builtin_##name(x); }
#define FROM_LIBM2(name) \
  static inline float name(float x, float y) { return __builtin_##name##f(x, y); } \
  static inline double name(double x, double y) { return __builtin_##name(x, y); }
#define FROM_LIBMVEC(name) \
  extern "C" VECTOR_TOO float name##f(float); \
  extern "C" VECTOR_TOO double name(double); \
  static inline float name(float x) { return name##f(x); }
#define FROM_LIBMVEC2(name) \
  extern "C" VECTOR_TOO float name##f(float, float); \
  extern "C" VECTOR_TOO double name(double, double); \
  static inline float name(float x, float y) { return name##f(x, y); }
FROM_LIBMVEC(sin) FROM_LIBMVEC(cos) FROM_LIBMVEC(tan)
FROM_LIBMVEC(asin) FROM_LIBMVEC(acos) FROM_LIBMVEC(atan)
FROM_LIBMVEC(sinh) FROM_LIBMVEC(cosh) FROM_LIBMVEC(asinh) FROM_LIBMVEC(acosh) FROM_LIBMVEC(atanh)
FROM_LIBMVEC(exp2) FROM_LIBMVEC(erfc)
FROM_LIBMVEC2(pow) FROM_LIBMVEC2(atan2) FROM_LIBMVEC2(hypot)
FROM_LIBM(lgamma) FROM_LIBM2(nextafter)
extern "C" VECTOR_TOO double exp(double);
extern "C" VECTOR_TOO double expm1(double);
extern "C" VECTOR_TOO double log(double);
extern "C" VECTOR_TOO double log2(double);
extern "C" VECTOR_TOO double log10(double);
extern "C" VECTOR_TOO double log1p(double);
extern "C" VECTOR_TOO double tanh(double);
extern "C" VECTOR_TOO double erf(double);

// ---- functions of float, without a branch, so that loops of them become vector code ----------------
// Polynomials are minimax fits; each function is within about 2 units in the last place.
struct Reduced { float n, r; };
// x = n*ln(2) + r with |r| <= ln(2)/2; ln(2) in two pieces, the first with zeros at its end.
static inline Reduced by_ln2(float x) {
  const float n = __builtin_rintf(x * 1.44269504f);
  return {n, (x - n * 0.693145752f) - n * 1.42860677e-6f};
}
// e^r - 1 - r
static inline float exp_rest(float r) {
  const float q = 0.1666651219f + r * (0.04166618735f + r * (0.008369598538f + r * 0.001395171858f));
  return r * r * (0.5f + r * q);
}
static inline float power_of_two(int32_t n) { return bit_cast<float>((n + 127) << 23); }
static inline float exp(float x) {
  const float y = x < -104.0f ? -104.0f : x;
  const bool tiny = y < -87.0f;  // the result may be a denormal: compute 2^64 times that first
  const Reduced a = by_ln2(y);
  const int32_t n = (int32_t)a.n + (tiny ? 64 : 0);
  const float result = bit_cast<float>(bit_cast<int32_t>(1.0f + (a.r + exp_rest(a.r))) + (n << 23));
  return (x > 88.72283f ? __builtin_inff() : result) * (tiny ? 0x1p-64f : 1.0f);
}
// For -20 <= x < 89 only.
static inline float expm1_between(float x) {
  const Reduced a = by_ln2(x);
  const float scale = power_of_two((int32_t)a.n - 1);
  return (scale * (a.r + exp_rest(a.r)) + (scale - 0.5f)) * 2.0f;
}
static inline float expm1(float x) {
  const float result = expm1_between(x > 89.0f ? 89.0f : x < -20.0f ? -20.0f : x);
  return x == 0.0f ? x : result;
}
// log(exp(a) + exp(b)) without overflow; of two equal infinities, that one
static inline double log_add_exp(double a, double b) {
  const double high = maximum(a, b), low = high == a ? b : a;
  return high == low && high - low != 0 ? high : high + log1p(exp(low - high));
}
static inline float sigmoid(float x) { return 1.0f / (1.0f + exp(-x)); }
static inline double sigmoid(double x) { return 1.0 / (1.0 + exp(-x)); }
static inline float tanh(float x) {
  const float a = __builtin_fabsf(x), e = expm1_between(2.0f * (a > 10.0f ? 10.0f : a));
  return __builtin_copysignf(e / (e + 2.0f), x);
}
static inline float erf(float x) {
  // -expm1(p(|x|)), where p is the logarithm of erfc
  float a = __builtin_fabsf(x);
  a = a > 4.0f ? 4.0f : a;
  float p = 2.135467003e-5f + a * -1.193305366e-6f;
  p = -0.00179935491f + a * (0.000740686723f + a * (-0.00016748131f + a * p));
  p = -0.1027712747f + a * (0.01911769435f + a * (0.000253061851f + a * p));
  p = a * (-1.128379226f + a * (-0.6366198063f + a * p));
  return __builtin_copysignf(expm1_between(p), x);
}
// log(x) = exponent*ln(2) + log(1 + f). `more` is added to x before; it is small against it.
struct Logarithm { float exponent, value; };
static inline Logarithm log_parts(float x, float more) {
  const bool tiny = x < 1.17549435e-38f;
  const int32_t bits = bit_cast<int32_t>(tiny ? x * 0x1p23f : x);
  const int32_t e = (bits - 0x3f3504f3) >> 23;  // so that 1 + f lies between sqrt(1/2) and sqrt(2)
  const float f = (bit_cast<float>(bits - (e << 23)) - 1.0f) + more * power_of_two(e > 126 ? -126 : -e);
  float p = 0.1290016621f + f * -0.07872934639f;
  p = -0.1662399918f + f * (0.1417882442f + f * (-0.1313221157f + f * p));
  p = 0.3333331645f + f * (-0.2500082552f + f * (0.2000237405f + f * p));
  return {(float)(tiny ? e - 23 : e), f + f * f * (f * p - 0.5f)};
}
static inline float log_ends(float x, float result) {  // where a logarithm is no number or infinite
  result = x == 0.0f ? -__builtin_inff() : x == __builtin_inff() ? x : result;
  return x < 0.0f || x != x ? __builtin_nanf("") : result;
}
static inline float log(float x) {
  const Logarithm a = log_parts(x, 0.0f);
  return log_ends(x, a.exponent * 0.693145752f + (a.exponent * 1.42860677e-6f + a.value));
}
static inline float log2(float x) {
  const Logarithm a = log_parts(x, 0.0f);
  return log_ends(x, a.exponent + (a.value * 1.44269504f + a.value * 1.92596303e-8f));
}
static inline float log10(float x) {
  const Logarithm a = log_parts(x, 0.0f);
  return log_ends(x, a.exponent * 0.301025391f + (a.exponent * 4.60503907e-6f + a.value * 0.434294482f));
}
static inline float log1p(float x) {
  const float u = 1.0f + x, lost = x > 1.0f ? 1.0f - (u - x) : x - (u - 1.0f);
  const Logarithm a = log_parts(u, u < __builtin_inff() ? lost : 0.0f);
  const float result = a.exponent * 0.693145752f + (a.exponent * 1.42860677e-6f + a.value);
  return x == 0.0f ? x : log_ends(u, result);
}
template <> inline float remainder(float a, float b) {
  const float r = fmod(a, b);
  return r != 0 && (r < 0) != (b < 0) ? r + b : r;
}
template <> inline double remainder(double a, double b) {
  const double r = fmod(a, b);
  return r != 0 && (r < 0) != (b < 0) ? r + b : r;
}

}  // namespace op

#pragma omp declare reduction(maximum : float, double, bool, uint8_t, int8_t, int16_t, int32_t, int64_t : \
    omp_out = op::maximum(omp_out, omp_in)) initializer(omp_priv = omp_orig)
#pragma omp declare reduction(minimum : float, double, bool, uint8_t, int8_t, int16_t, int32_t, int64_t : \
    omp_out = op::minimum(omp_out, omp_in)) initializer(omp_priv = omp_orig)

