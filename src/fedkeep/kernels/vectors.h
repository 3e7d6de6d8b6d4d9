// Vectors of one instruction set, and arithmetic on them.

#pragma once

#include <utility>

#include "runtime.h"

#if defined(FK_LEVEL_AVX512)
#include <immintrin.h>
#define FK_BYTES 64
#define FK_MR 6
#define FK_NV 4
#define FK_RUN run_avx512
#elif defined(FK_LEVEL_AVX2)
#include <immintrin.h>
#define FK_BYTES 32
#define FK_MR 3
#define FK_NV 2
#define FK_RUN run_avx2
#else
#define FK_BYTES 16
#define FK_MR 3
#define FK_NV 2
#define FK_RUN run_portable
#endif

#define FK_INLINE inline __attribute__((always_inline))

namespace fk {
namespace {

typedef float FloatVec __attribute__((vector_size(FK_BYTES)));
typedef double DoubleVec __attribute__((vector_size(FK_BYTES)));
typedef int32_t IntVec __attribute__((vector_size(FK_BYTES)));
typedef int64_t LongVec __attribute__((vector_size(FK_BYTES)));

template <class T> struct Lanes;

template <> struct Lanes<float> {
    typedef FloatVec Vec;
    typedef IntVec Bits;
    static constexpr int W = FK_BYTES / 4;
    static constexpr float MAGIC = 12582912.0f;  // 1.5 * 2^23: adding it rounds to an integer
    static constexpr float LOG2E = 1.44269504f, LN2_HIGH = 0.693359375f, LN2_LOW = -2.12194440e-4f;
    static constexpr int BIAS = 127, MANTISSA = 23;
    static constexpr float SIGMOID_LIMIT = 87.0f, TANH_LIMIT = 18.0f;

    // y - n log(2). Rounded once, log(2) = 0.693147181f serves: its error is 2e-9 n.
    static FK_INLINE Vec reduced(Vec y, Vec n) {
#if defined(__FMA__)
        return y - n * 0.693147181f;
#else
        return y - n * LN2_HIGH - n * LN2_LOW;
#endif
    }

    // expm1(r) / r for |r| <= log(2)/2; Chebyshev interpolation, relative error 2.5e-8. Coefficients in pairs: what
    // costs time is the chain of results that wait for one another, not their number.
    static FK_INLINE Vec expm1_over(Vec r) {
        Vec square = r * r;
        Vec high = (r * 1.392621347e-3f + 8.363202972e-3f) * square + (r * 4.166655444e-2f + 1.666657685e-1f);
        return high * square + (r * 5e-1f + 1.0f);
    }
};

template <> struct Lanes<double> {
    typedef DoubleVec Vec;
    typedef LongVec Bits;
    static constexpr int W = FK_BYTES / 8;
    static constexpr double MAGIC = 6755399441055744.0;
    static constexpr double LOG2E = 1.4426950408889634, LN2_HIGH = 6.93147180369123816490e-01,
                            LN2_LOW = 1.90821492927058770002e-10;
    static constexpr i64 BIAS = 1023, MANTISSA = 52;
    static constexpr double SIGMOID_LIMIT = 700.0, TANH_LIMIT = 40.0;

    static FK_INLINE Vec reduced(Vec y, Vec n) { return y - n * LN2_HIGH - n * LN2_LOW; }

    // Taylor series to r^13: relative error 4e-17.
    static FK_INLINE Vec expm1_over(Vec r) {
        Vec p = r * (1.0 / 6227020800.0) + 1.0 / 479001600.0;
        p = p * r + 1.0 / 39916800.0;
        p = p * r + 1.0 / 3628800.0;
        p = p * r + 1.0 / 362880.0;
        p = p * r + 1.0 / 40320.0;
        p = p * r + 1.0 / 5040.0;
        p = p * r + 1.0 / 720.0;
        p = p * r + 1.0 / 120.0;
        p = p * r + 1.0 / 24.0;
        p = p * r + 1.0 / 6.0;
        p = p * r + 0.5;
        return p * r + 1.0;
    }
};

template <class T> using Vec = typename Lanes<T>::Vec;

template <class T> FK_INLINE Vec<T> load(const T* p) {
    Vec<T> v;
    __builtin_memcpy(&v, p, sizeof v);
    return v;
}

template <class T> FK_INLINE void store(T* p, Vec<T> v) { __builtin_memcpy(p, &v, sizeof v); }

template <class T> FK_INLINE Vec<T> splat(T a) { return a - Vec<T>{}; }

// The first n lanes; the others are 0.
template <class T> FK_INLINE Vec<T> load_part(const T* p, i64 n) {
    if (n >= Lanes<T>::W) return load(p);
    Vec<T> v = {};
    for (i64 i = 0; i < n; i++) v[i] = p[i];
    return v;
}

template <class T> FK_INLINE void store_part(T* p, Vec<T> v, i64 n) {
    if (n >= Lanes<T>::W) return store(p, v);
    for (i64 i = 0; i < n; i++) p[i] = v[i];
}

// The sum of all lanes, always in the same order.
#if defined(__clang__)
template <int HALF, class V, int... LANE> FK_INLINE V sum_of_halves(V v, std::integer_sequence<int, LANE...> lanes) {
    v += __builtin_shufflevector(v, v, (LANE ^ HALF)...);
    if constexpr (HALF > 1) v = sum_of_halves<HALF / 2>(v, lanes);
    return v;
}

template <class T> FK_INLINE T sum_of(Vec<T> v) {
    return sum_of_halves<Lanes<T>::W / 2>(v, std::make_integer_sequence<int, Lanes<T>::W>{})[0];
}
#else
template <class T> FK_INLINE T sum_of(Vec<T> v) {
    typedef typename Lanes<T>::Bits Bits;
    constexpr int L = Lanes<T>::W;
    Bits lane;
    for (int i = 0; i < L; i++) lane[i] = i;
    for (int half = L / 2; half > 0; half /= 2) v += __builtin_shuffle(v, lane ^ half);
    return v[0];
}
#endif

// Rather than divide: 2 units in the last place for the reciprocal, 1 for the quotient.
#if defined(FK_LEVEL_AVX512)
FK_INLINE FloatVec reciprocal(FloatVec d) {
    FloatVec r = (FloatVec)_mm512_rcp14_ps((__m512)d);
    return r * (2.0f - d * r);
}

FK_INLINE FloatVec quotient(FloatVec a, FloatVec d) {
    FloatVec r = reciprocal(d), q = a * r;
    return q + r * (a - q * d);
}
#else
FK_INLINE FloatVec reciprocal(FloatVec d) { return 1.0f / d; }
FK_INLINE FloatVec quotient(FloatVec a, FloatVec d) { return a / d; }
#endif

FK_INLINE DoubleVec reciprocal(DoubleVec d) { return 1.0 / d; }
FK_INLINE DoubleVec quotient(DoubleVec a, DoubleVec d) { return a / d; }

// The least and the greatest of two; if b is NaN, b.
#if defined(FK_LEVEL_AVX512)
FK_INLINE FloatVec least_of(FloatVec a, FloatVec b) { return (FloatVec)_mm512_min_ps((__m512)a, (__m512)b); }
FK_INLINE FloatVec greatest_of(FloatVec a, FloatVec b) { return (FloatVec)_mm512_max_ps((__m512)a, (__m512)b); }
#elif defined(FK_LEVEL_AVX2)
FK_INLINE FloatVec least_of(FloatVec a, FloatVec b) { return (FloatVec)_mm256_min_ps((__m256)a, (__m256)b); }
FK_INLINE FloatVec greatest_of(FloatVec a, FloatVec b) { return (FloatVec)_mm256_max_ps((__m256)a, (__m256)b); }
#else
FK_INLINE FloatVec least_of(FloatVec a, FloatVec b) { return a < b ? a : b; }
FK_INLINE FloatVec greatest_of(FloatVec a, FloatVec b) { return a > b ? a : b; }
#endif

FK_INLINE DoubleVec least_of(DoubleVec a, DoubleVec b) { return a < b ? a : b; }
FK_INLINE DoubleVec greatest_of(DoubleVec a, DoubleVec b) { return a > b ? a : b; }

// A NaN is let through.
template <class T> FK_INLINE Vec<T> within(Vec<T> y, T limit) {
    return greatest_of(splat<T>(-limit), least_of(splat<T>(limit), y));
}

// exp(y) + add, for |y| within the limits above.
template <class T> FK_INLINE Vec<T> exp_plus(Vec<T> y, T add) {
    typedef Lanes<T> K;
    typedef typename K::Bits Bits;
    Vec<T> shifted = y * K::LOG2E + K::MAGIC;
    Vec<T> r = K::reduced(y, shifted - K::MAGIC);
    Bits k = (Bits)shifted - (Bits)splat<T>(K::MAGIC);
    Vec<T> scale = (Vec<T>)((k + K::BIAS) << K::MANTISSA);
    return scale * r * K::expm1_over(r) + (scale + add);
}

template <class T> FK_INLINE Vec<T> sigmoid(Vec<T> x) {
    return reciprocal(exp_plus<T>(within<T>(-x, Lanes<T>::SIGMOID_LIMIT), T(1)));
}

// expm1(2x) / (expm1(2x) + 2): exact to a few units in the last place also near 0.
template <class T> FK_INLINE Vec<T> tanh(Vec<T> x) {
    Vec<T> e = exp_plus<T>(within<T>(x + x, Lanes<T>::TANH_LIMIT), T(-1));
    return quotient(e, e + T(2));
}

FK_INLINE constexpr i64 round_up(i64 n, i64 to) { return (n + to - 1) / to * to; }
FK_INLINE constexpr i64 least(i64 a, i64 b) { return a < b ? a : b; }

// Asks for the cache lines of an array that is used soon.
template <class T> FK_INLINE void prefetch(const T* p, i64 n) {
    for (i64 i = 0; i < n; i += 64 / (i64)sizeof(T)) __builtin_prefetch(p + i);
}

template <class T> T* take(Arena* arena, i64 n) { return (T*)arena_take(arena, (size_t)(n > 0 ? n : 1) * sizeof(T)); }

template <class T> T* take_zeros(Arena* arena, i64 n) {
    T* p = take<T>(arena, n);
    __builtin_memset(p, 0, (size_t)n * sizeof(T));
    return p;
}

}  // namespace
}  // namespace fk
