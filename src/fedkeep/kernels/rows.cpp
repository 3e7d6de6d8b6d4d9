// Rows of a table under momentum, compiled once per instruction set; rows.h says what they are.

#include "rows.h"
#include "vectors.h"

namespace fk {
namespace rows {
namespace {

constexpr i64 AHEAD = 4;  // rows asked for before their turn, as they lie anywhere

template <class T> FK_INLINE void look_up(const T* w, const T* v, T way, i64 D, T* out) {
    constexpr i64 W = Lanes<T>::W;
    const Vec<T> wide = splat<T>(way);
    i64 j = 0;
    for (; j + W <= D; j += W) store(out + j, load(w + j) - wide * load(v + j));
    if (j < D) store_part(out + j, load_part(w + j, D - j) - wide * load_part(v + j, D - j), D - j);
}

template <class T> FK_INLINE void move(const T* row, const T* grad, T shrunk, T rate, i64 D, T* w, T* v) {
    constexpr i64 W = Lanes<T>::W;
    const Vec<T> wide = splat<T>(shrunk), eta = splat<T>(rate);
    i64 j = 0;
    for (; j + W <= D; j += W) {
        const Vec<T> fresh = wide * load(v + j) + load(grad + j);
        store(v + j, fresh);
        store(w + j, load(row + j) - eta * fresh);
    }
    if (j < D) {
        const Vec<T> fresh = wide * load_part(v + j, D - j) + load_part(grad + j, D - j);
        store_part(v + j, fresh, D - j);
        store_part(w + j, load_part(row + j, D - j) - eta * fresh, D - j);
    }
}

template <class T> void run(const Call& c, int phase, i64 task) {
    const T *shrunk = (const T*)c.shrunk, *way = (const T*)c.way, *rates = (const T*)c.rates;
    const i64 end = least(c.N, (task + 1) * BLOCK);
    for (i64 i = task * BLOCK; i < end; i++) {
        if (i + AHEAD < end) {
            prefetch((const T*)c.table + c.used[i + AHEAD] * c.D, c.D);
            prefetch((const T*)c.velocity + c.used[i + AHEAD] * c.D, c.D);
        }
        const i64 at = c.used[i], missed = c.step - c.last[at];
        T *w = (T*)c.table + at * c.D, *v = (T*)c.velocity + at * c.D, *row = (T*)c.rows + i * c.D;
        if (phase == LOOK_UP) {
            look_up<T>(w, v, way[missed], c.D, row);
        } else {
            move<T>(row, (const T*)c.grads + i * c.D, shrunk[missed] * rates[1], rates[0], c.D, w, v);
            c.last[at] = c.step + 1;
        }
    }
}

}  // namespace

void FK_RUN(const void* call, int phase, i64 task, Arena*) {
    const Call& c = *(const Call*)call;
    c.is_double ? run<double>(c, phase, task) : run<float>(c, phase, task);
}

}  // namespace rows
}  // namespace fk
