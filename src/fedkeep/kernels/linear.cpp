// The linear layer, compiled once per instruction set; linear.h says what it computes and how it is divided.

#include "linear.h"
#include "vectors.h"

namespace fk {
namespace linear {
namespace {

#if defined(FK_LEVEL_AVX512)
constexpr int ROWS = 5, WIDE = 2;  // rows in a tile of the forward pass, vectors of inputs in one of the backward pass
#else
constexpr int ROWS = 3, WIDE = 1;
#endif
constexpr int QUAD = 4;  // outputs in a tile
constexpr i64 PIECE = 1024;  // inputs of a tile: four rows of weights stay in the first cache for all rows of x

template <class T> FK_INLINE T* at(const void* base, i64 offset) { return (T*)base + offset; }

// MR rows of x times N outputs over n inputs, added to y (MR, O).
template <class T, int MR, int N>
void forward_tile(const T* x, i64 x_row, const T* w, i64 I, i64 n, bool ahead, T* y, i64 O) {
    constexpr i64 L = Lanes<T>::W;
    Vec<T> acc[MR][N] = {};
    i64 j = 0;
    for (; j + L <= n; j += L) {
        Vec<T> wide[N];
        for (int o = 0; o < N; o++) wide[o] = load(w + o * I + j);
        if (ahead)
            for (int o = 0; o < N; o++) __builtin_prefetch(w + o * I + j + PIECE, 0, 2);
        for (int r = 0; r < MR; r++) {
            Vec<T> a = load(x + r * x_row + j);
            for (int o = 0; o < N; o++) acc[r][o] += a * wide[o];
        }
    }
    if (j < n)
        for (int o = 0; o < N; o++) {
            const Vec<T> rest = load_part(w + o * I + j, n - j);
            for (int r = 0; r < MR; r++) acc[r][o] += load_part(x + r * x_row + j, n - j) * rest;
        }
    for (int r = 0; r < MR; r++)
        for (int o = 0; o < N; o++) y[r * O + o] += sum_of<T>(acc[r][o]);
}

template <class T, int N, int MR = ROWS>
FK_INLINE void forward_rows(i64 rows, const T* x, i64 x_row, const T* w, i64 I, i64 n, bool ahead, T* y, i64 O) {
    if (rows == MR) return forward_tile<T, MR, N>(x, x_row, w, I, n, ahead, y, O);
    if constexpr (MR > 1) forward_rows<T, N, MR - 1>(rows, x, x_row, w, I, n, ahead, y, O);
}

template <class T, int N> void forward_outputs(const Call& c, const T* x, const T* w, T* y) {
    for (i64 first = 0; first < c.I; first += PIECE) {
        i64 blocks = (c.B + ROWS - 1) / ROWS;
        for (i64 done = 0; blocks > 0; blocks--) {
            const i64 rows = (c.B - done + blocks - 1) / blocks;
            forward_rows<T, N>(rows, x + done * c.row_stride + first, c.row_stride, w + first, c.I,
                               least(PIECE, c.I - first), done == 0, y + done * c.O, c.O);
            done += rows;
        }
    }
}

template <class T> void forward(const Job& job, i64 task) {
    const Call& c = *job.call;
    const i64 tasks = blocks(c.O, OUTPUTS), g = task / tasks;
    const i64 first = task % tasks * OUTPUTS, last = least(c.O, first + OUTPUTS);
    const T *x = at<T>(c.x, g * c.x_stride), *w = at<T>(c.weight, g * c.weight_stride);
    const T* bias = at<T>(c.bias, g * c.bias_stride);
    T* y = at<T>(c.output, g * c.B * c.O);
    for (i64 b = 0; b < c.B; b++)
        for (i64 o = first; o < last; o++) y[b * c.O + o] = bias[o];
    i64 o = first;
    for (; o + QUAD <= last; o += QUAD) forward_outputs<T, QUAD>(c, x, w + o * c.I, y + o);
    for (; o < last; o++) forward_outputs<T, 1>(c, x, w + o * c.I, y + o);
    if (c.relu)
        for (i64 b = 0; b < c.B; b++)
            for (i64 i = b * c.O + first; i < b * c.O + last; i++) y[i] = y[i] <= T(0) ? T(0) : y[i];  // NaN stays
}

// Gradients of the outputs as (O, B), 0 where the ReLU is, and their sums.
template <class T> void mask(const Job& job, i64 g) {
    const Call& c = *job.call;
    const T *y = at<T>(c.output, g * c.B * c.O), *grad = at<T>(c.grad_output, g * c.B * c.O);
    T *to = at<T>(job.grads, g * c.B * c.O), *bias = at<T>(c.grad_bias, g * c.O);
    for (i64 o = 0; o < c.O; o++) {
        T sum = 0;
        for (i64 b = 0; b < c.B; b++) {
            const T value = c.relu && y[b * c.O + o] <= T(0) ? T(0) : grad[b * c.O + o];
            to[o * c.B + b] = value;
            sum += value;
        }
        bias[o] = sum;
    }
}

// N outputs, NV vectors of inputs: gradients of their weights from x (B, row), of the inputs (B, row) from the weights.
template <class T, int N, int NV, bool INPUT>
FK_INLINE void backward_tile(const T* grads, i64 B, const T* x, i64 row, const T* w, T* grad_w, i64 I, T* grad_x) {
    constexpr i64 L = Lanes<T>::W;
    Vec<T> acc[N][NV] = {}, wide[N][NV];
    for (int o = 0; o < N && INPUT; o++)
        for (int v = 0; v < NV; v++) wide[o][v] = load(w + o * I + v * L);
    for (i64 b = 0; b < B; b++) {
        Vec<T> a[NV], back[NV];
        for (int v = 0; v < NV; v++) a[v] = load(x + b * row + v * L);
        for (int v = 0; v < NV && INPUT; v++) back[v] = load(grad_x + b * row + v * L);
        for (int o = 0; o < N; o++) {
            const Vec<T> grad = splat<T>(grads[o * B + b]);
            for (int v = 0; v < NV; v++) {
                acc[o][v] += grad * a[v];
                if (INPUT) back[v] += grad * wide[o][v];
            }
        }
        for (int v = 0; v < NV && INPUT; v++) store(grad_x + b * row + v * L, back[v]);
    }
    for (int o = 0; o < N; o++)
        for (int v = 0; v < NV; v++) store(grad_w + o * I + v * L, acc[o][v]);
}

template <class T, int N, bool INPUT>
void backward_outputs(const T* grads, i64 B, const T* x, i64 row, const T* w, T* grad_w, i64 I, i64 n, T* grad_x) {
    constexpr i64 L = Lanes<T>::W;
    i64 j = 0;
    for (; j + WIDE * L <= n; j += WIDE * L) {
        for (int o = 0; o < N; o++) {  // the next outputs
            if (INPUT) __builtin_prefetch(w + (N + o) * I + j, 0, 2);
            __builtin_prefetch(grad_w + (N + o) * I + j, 1, 2);
        }
        backward_tile<T, N, WIDE, INPUT>(grads, B, x + j, row, w + j, grad_w + j, I, grad_x + j);
    }
    for (; j + L <= n; j += L)
        backward_tile<T, N, 1, INPUT>(grads, B, x + j, row, w + j, grad_w + j, I, grad_x + j);
    for (; j < n; j++)
        for (int o = 0; o < N; o++) {
            T sum = 0;
            for (i64 b = 0; b < B; b++) {
                sum += grads[o * B + b] * x[b * row + j];
                if (INPUT) grad_x[b * row + j] += grads[o * B + b] * w[o * I + j];
            }
            grad_w[o * I + j] = sum;
        }
}

template <class T, bool INPUT> void backward(const Job& job, i64 task, Arena* arena) {
    const Call& c = *job.call;
    const i64 tasks = blocks(c.I, INPUTS), g = task / tasks;
    const i64 first = task % tasks * INPUTS, n = least(INPUTS, c.I - first);
    const i64 row = INPUTS + 16;  // rows one line apart, so that they do not fall on one another in the cache
    T* x = take<T>(arena, c.B * row);
    T* grad_x = INPUT ? take_zeros<T>(arena, c.B * row) : nullptr;
    for (i64 b = 0; b < c.B; b++)
        __builtin_memcpy(x + b * row, at<T>(c.x, g * c.x_stride + b * c.row_stride + first), (size_t)n * sizeof(T));
    const T *w = at<T>(c.weight, g * c.weight_stride + first), *grads = at<T>(job.grads, g * c.B * c.O);
    T* grad_w = at<T>(c.grad_weight, g * c.O * c.I + first);
    i64 o = 0;
    for (; o + QUAD <= c.O; o += QUAD)
        backward_outputs<T, QUAD, INPUT>(grads + o * c.B, c.B, x, row, w + o * c.I, grad_w + o * c.I, c.I, n, grad_x);
    for (; o < c.O; o++)
        backward_outputs<T, 1, INPUT>(grads + o * c.B, c.B, x, row, w + o * c.I, grad_w + o * c.I, c.I, n, grad_x);
    for (i64 b = 0; b < c.B && INPUT; b++)
        __builtin_memcpy(at<T>(c.grad_input, (g * c.B + b) * c.I + first), grad_x + b * row, (size_t)n * sizeof(T));
}

template <class T> void run(const Job& job, int phase, i64 task, Arena* arena) {
    if (phase == FORWARD) forward<T>(job, task);
    if (phase == MASK) mask<T>(job, task);
    if (phase == BACKWARD && job.call->grad_input) backward<T, true>(job, task, arena);
    if (phase == BACKWARD && !job.call->grad_input) backward<T, false>(job, task, arena);
}

}  // namespace

void FK_RUN(const void* data, int phase, i64 task, Arena* arena) {
    const Job& job = *(const Job*)data;
    job.call->is_double ? run<double>(job, phase, task, arena) : run<float>(job, phase, task, arena);
}

}  // namespace linear
}  // namespace fk
