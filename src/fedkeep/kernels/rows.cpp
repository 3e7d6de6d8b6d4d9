// Rows of a table under momentum, compiled once per instruction set; rows.h says what they are.

#include "rows.h"
#include "vectors.h"

namespace fk {
namespace rows {
namespace {

constexpr i64 AHEAD = 4;  // rows asked for before their turn, as they lie anywhere

// The row at w as it is now, and its velocity, whose powers are p.
template <class T> struct Present {
    Vec<T> row, velocity;
    FK_INLINE Present(Vec<T> w, Vec<T> v, Vec<T> r, const T* p) {
        const Vec<T> d = w - r;
        row = r + splat<T>(p[0]) * d + splat<T>(p[1]) * v;
        velocity = splat<T>(p[2]) * d + splat<T>(p[3]) * v;
    }
};

template <class T> FK_INLINE void look_up(const T* w, const T* v, const T* r, const T* p, i64 D, T* out) {
    constexpr i64 W = Lanes<T>::W;
    i64 j = 0;
    for (; j + W <= D; j += W) store(out + j, Present<T>(load(w + j), load(v + j), r ? load(r + j) : Vec<T>{}, p).row);
    if (j < D) {
        const i64 n = D - j;
        const Vec<T> anchor = r ? load_part(r + j, n) : Vec<T>{};
        store_part(out + j, Present<T>(load_part(w + j, n), load_part(v + j, n), anchor, p).row, n);
    }
}

// What is moved of one row, and the products of what comes out.
template <class T> struct Move {
    Vec<T> eta, mu, dd = {}, dv = {}, vv = {};
    Move(T rate, T momentum) : eta(splat<T>(rate)), mu(splat<T>(momentum)) {}

    FK_INLINE void step(Vec<T> row, Vec<T> grad, Vec<T> r, const T* p, Vec<T>& w, Vec<T>& v) {
        v = mu * Present<T>(w, v, r, p).velocity + grad;
        w = row - eta * v;
        const Vec<T> d = w - r;
        dd += d * d, dv += d * v, vv += v * v;
    }
};

template <class T>
FK_INLINE void move(
    const T* row, const T* grad, const T* r, const T* p, const T* rates, i64 D, T* w, T* v, T* products) {
    constexpr i64 W = Lanes<T>::W;
    Move<T> move(rates[0], rates[1]);
    i64 j = 0;
    for (; j + W <= D; j += W) {
        Vec<T> wide = load(w + j), velocity = load(v + j);
        move.step(load(row + j), load(grad + j), r ? load(r + j) : Vec<T>{}, p, wide, velocity);
        store(w + j, wide);
        store(v + j, velocity);
    }
    if (j < D) {
        const i64 n = D - j;
        Vec<T> wide = load_part(w + j, n), velocity = load_part(v + j, n);
        move.step(load_part(row + j, n), load_part(grad + j, n), r ? load_part(r + j, n) : Vec<T>{}, p, wide, velocity);
        store_part(w + j, wide, n);
        store_part(v + j, velocity, n);
    }
    if (products) products[0] = sum_of<T>(move.dd), products[1] = sum_of<T>(move.dv), products[2] = sum_of<T>(move.vv);
}

template <class T> void run(const Call& c, int phase, i64 task) {
    const T *table = (const T*)c.table, *velocity = (const T*)c.velocity, *anchor = (const T*)c.anchor;
    const T* rates = (const T*)c.rates;
    const i64 end = least(c.N, (task + 1) * BLOCK);
    for (i64 i = task * BLOCK; i < end; i++) {
        if (i + AHEAD < end) {
            const i64 next = c.used[i + AHEAD] * c.D;
            prefetch(table + next, c.D);
            prefetch(velocity + next, c.D);
            if (anchor) prefetch(anchor + next, c.D);
        }
        const i64 at = c.used[i];
        const T *p = (const T*)c.powers + 4 * (c.step - c.last[at]), *r = anchor ? anchor + at * c.D : nullptr;
        T *w = (T*)c.table + at * c.D, *v = (T*)c.velocity + at * c.D, *row = (T*)c.rows + i * c.D;
        if (phase == LOOK_UP) {
            look_up<T>(w, v, r, p, c.D, row);
        } else {
            T* products = c.products ? (T*)c.products + at * 3 : nullptr;
            move<T>(row, (const T*)c.grads + i * c.D, r, p, rates, c.D, w, v, products);
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
