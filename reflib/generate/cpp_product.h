// ---- matrix products whose sums have one order -------------------------------------------------
// An element is the sum, in order, of what blocks of DEPTH give; a block gives a chain of fused multiply-adds, in order
// (where there is no such instruction: of products and sums). Neither the number of rows, nor tiles, threads, or the
// place of an element among others have a part in it.
#if defined(__AVX512F__)
#define LANE_BYTES 64
#elif defined(__AVX2__) && defined(__FMA__)
#define LANE_BYTES 32
#else
#define LANE_BYTES 16
#endif

namespace op {

template <class T> struct lanes_of {
  typedef T type __attribute__((vector_size(LANE_BYTES), aligned(sizeof(T)), may_alias));
};
template <class T> using lanes = typename lanes_of<T>::type;
#if LANE_BYTES == 64
static inline lanes<float> fused(lanes<float> a, lanes<float> b, lanes<float> c) {
  return __builtin_ia32_vfmaddps512_mask(a, b, c, -1, 4);
}
static inline lanes<double> fused(lanes<double> a, lanes<double> b, lanes<double> c) {
  return __builtin_ia32_vfmaddpd512_mask(a, b, c, -1, 4);
}
#elif LANE_BYTES == 32
static inline lanes<float> fused(lanes<float> a, lanes<float> b, lanes<float> c) {
  return __builtin_ia32_vfmaddps256(a, b, c);
}
static inline lanes<double> fused(lanes<double> a, lanes<double> b, lanes<double> c) {
  return __builtin_ia32_vfmaddpd256(a, b, c);
}
#else
template <class L> static inline L fused(L a, L b, L c) { return a * b + c; }
#endif

struct Matrix { int64_t batch, row, column; };  // strides
constexpr int64_t DEPTH = 256;
constexpr int BLOCK_ROWS = LANE_BYTES == 64 ? 12 : 6;  // sums of such a block, two vectors a row, are kept in registers
template <class T> constexpr int WIDTH = 2 * LANE_BYTES / (int)sizeof(T);

// c += a @ b for R rows and WIDTH columns; all three contiguous along a row. (Not inline: compiled once for all kernels.)
template <int R, class T>
static __attribute__((noinline)) void multiply_block(const T* a, int64_t lda, const T* b, int64_t ldb, T* c, int64_t ldc, int64_t depth) {
  constexpr int L = WIDTH<T> / 2;
  lanes<T> sum[R][2];
  for (int i = 0; i < R; ++i) sum[i][0] = sum[i][1] = lanes<T>{};
  for (int64_t k = 0; k < depth; ++k) {
    const lanes<T> left = *(const lanes<T>*)(b + k * ldb), right = *(const lanes<T>*)(b + k * ldb + L);
#pragma GCC unroll 16
    for (int i = 0; i < R; ++i) {
      const lanes<T> x = a[i * lda + k] - lanes<T>{};
      sum[i][0] = fused(x, left, sum[i][0]);
      sum[i][1] = fused(x, right, sum[i][1]);
    }
  }
  for (int i = 0; i < R; ++i) {
    *(lanes<T>*)(c + i * ldc) += sum[i][0];
    *(lanes<T>*)(c + i * ldc + L) += sum[i][1];
  }
}

template <class T, class S, class Read>
static inline void read_rows(const S* from, Matrix s, Read read, T* to, int64_t ld, int64_t rows, int64_t n) {
  for (int64_t i = 0; i < rows; ++i) {
    if (s.column == 1) {
#pragma omp simd
      for (int64_t k = 0; k < n; ++k) to[i * ld + k] = read(from[i * s.row + k]);
    } else {
      for (int64_t k = 0; k < n; ++k) to[i * ld + k] = read(from[i * s.row + k * s.column]);
    }
  }
}

// `depth` rows of WIDTH columns, of which n exist; the others are zeros
template <class T, class S, class Read>
static inline void read_columns(const S* from, Matrix s, Read read, T* to, int64_t depth, int64_t n) {
  constexpr int W = WIDTH<T>;
  int64_t k = 0;
  if (n >= W && s.column == 1) {
    for (; k < depth; ++k) {
#pragma omp simd
      for (int j = 0; j < W; ++j) to[k * W + j] = read(from[k * s.row + j]);
    }
  } else if (n >= W) {  // eight at a time along k, where a transposed matrix is contiguous
    for (; k + 8 <= depth; k += 8) {
      T t[8][W];
      for (int j = 0; j < W; ++j)
        for (int d = 0; d < 8; ++d) t[d][j] = read(from[(k + d) * s.row + j * s.column]);
      for (int d = 0; d < 8; ++d)
        for (int j = 0; j < W; ++j) to[(k + d) * W + j] = t[d][j];
    }
  }
  for (; k < depth; ++k)
    for (int j = 0; j < W; ++j) to[k * W + j] = j < n ? read(from[k * s.row + j * s.column]) : T(0);
}

// a @ b, in tiles; `epilogue` gets each: (batch, rows from, to, columns from, to, the tile, its row stride).
template <class T, class A, class ReadA, class B, class ReadB, class Epilogue>
static inline void product(
    const A* a, Matrix sa, ReadA read_a, const B* b, Matrix sb, ReadB read_b, int64_t batches, int64_t rows,
    int64_t columns, int64_t depth, int threads, Epilogue epilogue) {
  constexpr int64_t W = WIDTH<T>, HIGH = 768 / sizeof(T), WIDE = 512 / sizeof(T), LDA = DEPTH + 8;
  int64_t wide = WIDE;
  const int64_t high = rows < HIGH ? rows : HIGH, down = (rows + HIGH - 1) / HIGH;
  while (wide > W && batches * down * ((columns + wide - 1) / wide) < 2 * threads) wide /= 2;
  const int64_t across = (columns + wide - 1) / wide, tiles = batches * down * across;
#pragma omp parallel for schedule(static) num_threads(threads) if (batches * rows * columns * depth >= 32768)
  for (int64_t tile = 0; tile < tiles; ++tile) {
    T c[HIGH * WIDE], packed_a[HIGH * LDA], packed_b[DEPTH * W];
    const int64_t z = tile / (down * across), m = tile / across % down * HIGH, n = tile % across * wide;
    const int64_t ms = min<int64_t>(high, rows - m), ns = min<int64_t>(wide, columns - n);
    for (int64_t i = 0; i < ms * wide; ++i) c[i] = 0;
    for (int64_t k = 0; k < depth; k += DEPTH) {
      const int64_t ks = min<int64_t>(DEPTH, depth - k);
      read_rows(a + z * sa.batch + m * sa.row + k * sa.column, sa, read_a, packed_a, LDA, ms, ks);
      for (int64_t j = 0; j < ns; j += W) {
        read_columns(b + z * sb.batch + k * sb.row + (n + j) * sb.column, sb, read_b, packed_b, ks, ns - j);
        int64_t i = 0;
        for (; i + BLOCK_ROWS <= ms; i += BLOCK_ROWS)
          multiply_block<BLOCK_ROWS, T>(packed_a + i * LDA, LDA, packed_b, W, c + i * wide + j, wide, ks);
        for (; i + 2 <= ms; i += 2)
          multiply_block<2, T>(packed_a + i * LDA, LDA, packed_b, W, c + i * wide + j, wide, ks);
        for (; i < ms; ++i)
          multiply_block<1, T>(packed_a + i * LDA, LDA, packed_b, W, c + i * wide + j, wide, ks);
      }
    }
    epilogue(z, m, m + ms, n, n + ns, c, wide);
  }
}

// The sum of n floats: of sixteen lanes, then of these.
static inline float sum_in_order(const float* x, int64_t n) {
  float lane[16] = {};
  int64_t i = 0;
  for (; i + 16 <= n; i += 16) {
#pragma omp simd
    for (int t = 0; t < 16; ++t) lane[t] += x[i + t];
  }
  for (int t = 0; i + t < n; ++t) lane[t] += x[i + t];
  for (int half = 8; half > 0; half /= 2)
    for (int t = 0; t < half; ++t) lane[t] += lane[t + half];
  return lane[0];
}

}  // namespace op
