// Sums of uploads, compiled once per instruction set; values.h says what they are.

#include "values.h"
#include "vectors.h"

namespace fk {
namespace values {
namespace {

typedef float HalfVec __attribute__((vector_size(FK_BYTES / 2)));  // as many floats as a vector has doubles

FK_INLINE DoubleVec load_wide(const float* p) {
    HalfVec v;
    __builtin_memcpy(&v, p, sizeof v);
    return __builtin_convertvector(v, DoubleVec);
}

FK_INLINE DoubleVec load_wide(const double* p) { return load(p); }

FK_INLINE void store_narrow(float* p, DoubleVec v) {
    const HalfVec narrow = __builtin_convertvector(v, HalfVec);
    __builtin_memcpy(p, &narrow, sizeof narrow);
}

FK_INLINE void store_narrow(double* p, DoubleVec v) { store(p, v); }

template <class T> FK_INLINE bool finite(const T* x, i64 n) {
    constexpr i64 W = Lanes<T>::W;
    Vec<T> zeros[4] = {};  // x − x is NaN where x is not finite
    i64 i = 0;
    for (; i + 4 * W <= n; i += 4 * W)
        for (int k = 0; k < 4; k++) {
            const Vec<T> v = load(x + i + k * W);
            zeros[k] += v - v;
        }
    for (; i < n; i += W) {
        const Vec<T> v = load_part(x + i, n - i);
        zeros[0] += v - v;
    }
    const T sum = sum_of<T>((zeros[0] + zeros[1]) + (zeros[2] + zeros[3]));
    return sum == T(0);
}

enum From { SUM, ZEROS, HELD };

template <class T, From from>
FK_INLINE void fold(double* sum, const T* x, double w, const T* held, double u, i64 n) {
    constexpr i64 W = Lanes<double>::W;
    i64 i = 0;
    for (; i + W <= n; i += W) {
        DoubleVec before = {};
        if (from == SUM) before = load(sum + i);
        if (from == HELD) before += splat(u) * load_wide(held + i);
        store(sum + i, before + splat(w) * load_wide(x + i));
    }
    for (; i < n; i++) {
        double before = 0;
        if (from == SUM) before = sum[i];
        if (from == HELD) before += u * (double)held[i];
        sum[i] = before + w * (double)x[i];
    }
}

template <class T> FK_INLINE void divide(const double* sum, double w, T* mean, i64 n) {
    constexpr i64 W = Lanes<double>::W;
    i64 i = 0;
    for (; i + W <= n; i += W) store_narrow(mean + i, load(sum + i) / w);
    for (; i < n; i++) mean[i] = (T)(sum[i] / w);
}

template <class T> void fold_rows(const Call& c, i64 first, i64 n) {
    for (i64 i = first; i < first + n; i++) {
        double* sum = c.sum + c.places[i] * c.width;
        const T* x = (const T*)c.given + i * c.width;
        if (c.places[i] >= c.fresh)
            fold<T, ZEROS>(sum, x, c.weight, nullptr, 0, c.width);
        else
            fold<T, SUM>(sum, x, c.weight, nullptr, 0, c.width);
    }
}

template <class T> void run(Job& job, int phase, i64 task) {
    const Call& c = *job.call;
    const i64 first = task * BLOCK, n = least(BLOCK, c.N - first);
    if (phase == FOLD_ROWS) return fold_rows<T>(c, first, n);
    const T *given = (const T*)c.given + first, *held = (const T*)c.held + first;
    if (phase == FINITE) {
        if (!finite(given, n)) __atomic_store_n(&job.bad, 1, __ATOMIC_RELAXED);
    } else if (phase == MEAN) {
        divide<T>(c.sum + first, c.weight, (T*)c.mean + first, n);
    } else if (c.held) {
        fold<T, HELD>(c.sum + first, given, c.weight, held, c.held_weight, n);
    } else if (c.fresh) {
        fold<T, ZEROS>(c.sum + first, given, c.weight, held, 0, n);
    } else {
        fold<T, SUM>(c.sum + first, given, c.weight, held, 0, n);
    }
}

}  // namespace

void FK_RUN(const void* job, int phase, i64 task, Arena*) {
    Job& own = *(Job*)job;
    own.call->is_double ? run<double>(own, phase, task) : run<float>(own, phase, task);
}

}  // namespace values
}  // namespace fk
