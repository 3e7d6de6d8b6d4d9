// The recurrent layers, compiled once per instruction set; recurrent.h says what they compute and how it is divided.

#include "recurrent.h"
#include "vectors.h"

namespace fk {
namespace recurrent {
namespace {

// ------------------------------------------------------------------------------------------------ matrix products

// As many sums as there are registers for; on fewer registers narrower tiles, whose part of B stays in the cache.
constexpr int PRODUCT_ROWS = 6;

// Memory that is needed soon, and that a product on the way asks for, a little with every column of A.
template <class T> struct Ahead {
    const T* at;
    i64 count, each;  // numbers: all of it, and from one request to the next
};

// C (MR, NV*W) = or += A (MR, K) B (K, NV*W); A is read by row, or (transposed) by column.
template <class T, int MR, int NV, bool TRANSPOSED, bool AHEAD>
FK_INLINE void product_tile(i64 K, const T* A, i64 lda, const T* B, i64 ldb, T* C, i64 ldc, bool add, Ahead<T>& ahead) {
    constexpr int W = Lanes<T>::W;
    Vec<T> acc[MR][NV] = {};
    for (i64 k = 0; k < K; k++) {
        Vec<T> b[NV];
        for (int v = 0; v < NV; v++) b[v] = load(B + k * ldb + v * W);
        if (AHEAD) {
            __builtin_prefetch(ahead.at, 0, 2);
            ahead.at += ahead.each;
        }
        for (int r = 0; r < MR; r++) {
            Vec<T> a = splat<T>(TRANSPOSED ? A[k * lda + r] : A[r * lda + k]);
            for (int v = 0; v < NV; v++) acc[r][v] += a * b[v];
        }
    }
    for (int r = 0; r < MR; r++)
        for (int v = 0; v < NV; v++) {
            T* c = C + r * ldc + v * W;
            store(c, add ? load(c) + acc[r][v] : acc[r][v]);
        }
}

template <class T, int NV, bool TRANSPOSED, bool AHEAD>
void product_rows(
    i64 rows, i64 K, const T* A, i64 lda, const T* B, i64 ldb, T* C, i64 ldc, bool add, Ahead<T>& ahead
) {
    i64 blocks = (rows + PRODUCT_ROWS - 1) / PRODUCT_ROWS;
    for (i64 done = 0; blocks > 0; blocks--) {
        i64 n = (rows - done + blocks - 1) / blocks;  // even blocks: 16 rows are 6 + 5 + 5
        const T* a = TRANSPOSED ? A + done : A + done * lda;
        T* c = C + done * ldc;
        switch (n) {
            case 1: product_tile<T, 1, NV, TRANSPOSED, AHEAD>(K, a, lda, B, ldb, c, ldc, add, ahead); break;
            case 2: product_tile<T, 2, NV, TRANSPOSED, AHEAD>(K, a, lda, B, ldb, c, ldc, add, ahead); break;
            case 3: product_tile<T, 3, NV, TRANSPOSED, AHEAD>(K, a, lda, B, ldb, c, ldc, add, ahead); break;
            case 4: product_tile<T, 4, NV, TRANSPOSED, AHEAD>(K, a, lda, B, ldb, c, ldc, add, ahead); break;
            case 5: product_tile<T, 5, NV, TRANSPOSED, AHEAD>(K, a, lda, B, ldb, c, ldc, add, ahead); break;
            case 6: product_tile<T, 6, NV, TRANSPOSED, AHEAD>(K, a, lda, B, ldb, c, ldc, add, ahead); break;
        }
        done += n;
    }
}

// C (rows, columns) = or += A B; columns is a multiple of W.
template <class T, bool TRANSPOSED, bool AHEAD = false>
void product(
    i64 rows, i64 columns, i64 K, const T* A, i64 lda, const T* B, i64 ldb, T* C, i64 ldc, bool add,
    Ahead<T> ahead = {}
) {
    constexpr int W = Lanes<T>::W;
    const i64 tiles = ((rows + PRODUCT_ROWS - 1) / PRODUCT_ROWS) * ((columns + FK_NV * W - 1) / (FK_NV * W));
    if (AHEAD) ahead.each = ahead.count / (tiles * K) + 1;
    for (i64 j = 0; j < columns; j += FK_NV * W) {
        switch (least(FK_NV, (columns - j) / W)) {
            case 1: product_rows<T, 1, TRANSPOSED, AHEAD>(rows, K, A, lda, B + j, ldb, C + j, ldc, add, ahead); break;
            case 2: product_rows<T, 2, TRANSPOSED, AHEAD>(rows, K, A, lda, B + j, ldb, C + j, ldc, add, ahead); break;
#if FK_NV == 4
            case 3: product_rows<T, 3, TRANSPOSED, AHEAD>(rows, K, A, lda, B + j, ldb, C + j, ldc, add, ahead); break;
            case 4: product_rows<T, 4, TRANSPOSED, AHEAD>(rows, K, A, lda, B + j, ldb, C + j, ldc, add, ahead); break;
#endif
        }
    }
}

// ------------------------------------------------------------------------------------------------ plan of a task

struct Plan {
    i64 first, B;  // the sequences of this plan are first .. first + B of the client's
    i64 rows, steps;
    i64 *order, *length;  // (B,): which of the client's sequences stands at place j, and its length
    i64 *active, *offset;  // (steps,), (steps + 1,)
};

Plan make_plan(const Call& c, i64 g, i64 first, i64 count, Arena* arena) {
    const i64* lengths = c.lengths + g * c.lengths_stride + first;
    Plan p;
    p.first = first, p.B = count;
    p.order = take<i64>(arena, count);
    p.length = take<i64>(arena, count);
    i64* longer = take_zeros<i64>(arena, c.L + 2);  // how many sequences are at least this long
    p.steps = 0;
    for (i64 b = 0; b < count; b++) {
        longer[lengths[b]]++;
        if (lengths[b] > p.steps) p.steps = lengths[b];
    }
    for (i64 n = c.L; n >= 0; n--) longer[n] += longer[n + 1];
    p.active = take<i64>(arena, p.steps);
    p.offset = take<i64>(arena, p.steps + 1);
    p.offset[0] = 0;
    for (i64 t = 0; t < p.steps; t++) {
        p.active[t] = longer[t + 1];
        p.offset[t + 1] = p.offset[t] + p.active[t];
    }
    p.rows = p.offset[p.steps];
    for (i64 b = 0; b < count; b++) {  // a counting sort: places of one length begin after all longer ones
        i64 place = longer[lengths[b] + 1]++;
        p.order[place] = first + b;
        p.length[place] = lengths[b];
    }
    return p;
}

Plan whole_plan(const Call& c, i64 g, Arena* arena) { return make_plan(c, g, 0, c.B, arena); }

struct Task {
    i64 g, d, chunk;
    Plan plan;
    Task(const Call& c, i64 task, Arena* arena) {
        const i64 chunks = chunks_of(c.B), size = (c.B + chunks - 1) / chunks;
        chunk = task % chunks, d = task / chunks % c.D, g = task / chunks / c.D;
        const i64 first = least(c.B, chunk * size);
        plan = make_plan(c, g, first, least(size, c.B - first), arena);
    }
};

// Which place in the client's (B, L) the sequence at place j has at step t.
FK_INLINE i64 cell_of(const Call& c, const Plan& p, i64 d, i64 j, i64 t) {
    return p.order[j] * c.L + (d == 0 ? t : p.length[j] - 1 - t);
}

// The table rows in use, by rising id: slot (V,) maps an id to its number among them; rows is the way back.
struct Used {
    i64 count;
    int32_t* slot;
    i64* rows;
};

Used find_used(const Call& c, const Plan& p, i64 g, Arena* arena) {
    const i64* ids = c.ids + g * c.ids_stride;
    Used u;
    u.slot = take_zeros<int32_t>(arena, c.V);
    for (i64 j = 0; j < p.B; j++)
        for (i64 t = 0; t < p.length[j]; t++) u.slot[ids[p.order[j] * c.L + t]] = 1;
    u.rows = take<i64>(arena, least(c.V, p.rows));
    u.count = 0;
    for (i64 v = 0; v < c.V; v++)
        if (u.slot[v]) {
            u.slot[v] = (int32_t)u.count;
            u.rows[u.count++] = v;
        }
    return u;
}

// ------------------------------------------------------------------------------------------------ cells

// For W hidden units of one sequence at one step a record of vectors lies in `work`. LSTM: i, f, g, o and the cell state;
// GRU: r, z, n and the hidden part of n. Four vectors belong to them in the gate gradients. LSTM: i, f, g, o; GRU:
// input part of n, r, z, hidden part of n, so that the three which meet the inputs and the three which meet the hidden
// state both lie together.
template <bool GRU> struct Cell;

template <> struct Cell<false> {
    static constexpr int GATES = 4, RECORD = 5;
    static constexpr int x_gate[4] = {0, 1, 2, 3}, h_gate[4] = {0, 1, 2, 3};  // gate of weights at each place
    static constexpr int h_first = 0;  // where the hidden state's gradients begin
    static constexpr int h_sum[4] = {0, 1, 2, 3};  // which sum a gate's hidden part is added to
};

template <> struct Cell<true> {
    static constexpr int GATES = 3, RECORD = 4;
    static constexpr int x_gate[3] = {2, 0, 1}, h_gate[3] = {0, 1, 2};
    static constexpr int h_first = 1;
    static constexpr int h_sum[3] = {0, 1, 3};
};

template <class T> struct Sizes {
    static constexpr int W = Lanes<T>::W;
    i64 HP, IP;
    explicit Sizes(const Call& c) : HP(round_up(c.H, W)), IP(round_up(c.I, W)) {}
};

// Weights (GATES*H, K) to panels (HP/W, K, GATES, W): what one tile of hidden units reads lies together.
template <class T, bool GRU> void pack_panels(const T* weight, i64 H, i64 HP, i64 K, T* panels) {
    constexpr int W = Lanes<T>::W, N = Cell<GRU>::GATES;
    if (HP != H) __builtin_memset(panels, 0, (size_t)(HP * K * N) * sizeof(T));
    for (int gate = 0; gate < N; gate++)
        for (i64 u = 0; u < H; u++) {
            const T* from = weight + (gate * H + u) * K;
            T* to = panels + (u / W * K * N + gate) * W + u % W;
            for (i64 k = 0; k < K; k++) to[k * N * W] = from[k];
        }
}

// Biases to four sums (4, HP): both biases where they are added, apart where the GRU keeps them apart.
template <class T, bool GRU> void pack_bias(const T* b_ih, const T* b_hh, i64 H, i64 HP, T* bias) {
    __builtin_memset(bias, 0, (size_t)(4 * HP) * sizeof(T));
    for (int gate = 0; gate < Cell<GRU>::GATES; gate++)
        for (i64 u = 0; u < H; u++) {
            bias[gate * HP + u] += b_ih[gate * H + u];
            bias[Cell<GRU>::h_sum[gate] * HP + u] += b_hh[gate * H + u];
        }
}

// One step of one tile of W hidden units.
template <class T> struct Step {
    const T *x_panel, *h_panel, *bias;  // x_panel null: x is projected already
    i64 I, H, HP;
    const T* const* x;  // (n,) rows of inputs, or rows of the projected table
    const T *h_before, *before;  // (n, HP) states and (n,) records of the step before; null at the first step
    T *records, *h;  // (n,), (n, HP)
    const T* next;  // (n,) the records that are written after these
};

template <class T, bool GRU, int MR> FK_INLINE void sum_x(Vec<T> (&acc)[MR][4], const T* const* x, i64 I, const T* panel) {
    constexpr int W = Lanes<T>::W, N = Cell<GRU>::GATES;
    for (i64 k = 0; k < I; k++) {
        Vec<T> w[N];
        for (int v = 0; v < N; v++) w[v] = load(panel + (k * N + v) * W);
        for (int r = 0; r < MR; r++) {
            Vec<T> a = splat<T>(x[r][k]);
            for (int v = 0; v < N; v++) acc[r][v] += a * w[v];
        }
    }
}

// One tile (MR sequences, W hidden units) of one step: its sums.
template <class T, bool GRU, int MR> FK_INLINE void step_tile(const Step<T>& s, i64 j, i64 u) {
    constexpr int W = Lanes<T>::W, N = Cell<GRU>::GATES, RECORD = Cell<GRU>::RECORD * W;
    const i64 HP = s.HP;
    Vec<T> acc[MR][4];
    if (s.x_panel) {
        for (int r = 0; r < MR; r++)
            for (int v = 0; v < 4; v++) acc[r][v] = load(s.bias + v * HP + u);
        sum_x<T, GRU, MR>(acc, s.x + j, s.I, s.x_panel);
    } else {
        for (int r = 0; r < MR; r++) {
            for (int v = 0; v < N; v++) acc[r][v] = load(s.x[j + r] + v * HP + u);
            for (int v = N; v < 4; v++) acc[r][v] = load(s.bias + v * HP + u);
        }
    }
    if (s.h_before) {
        const T *h = s.h_before + j * HP, *next = s.next + j * RECORD;
        const i64 ahead = (MR * RECORD + s.H - 1) / s.H;  // what is written after this comes into the cache meanwhile
        for (i64 k = 0; k < s.H; k++) {
            Vec<T> w[N];
            for (int v = 0; v < N; v++) w[v] = load(s.h_panel + (k * N + v) * W);
            __builtin_prefetch(next, 1);
            next += ahead;
            for (int r = 0; r < MR; r++) {
                Vec<T> a = splat<T>(h[r * HP + k]);
                for (int v = 0; v < N; v++) acc[r][Cell<GRU>::h_sum[v]] += a * w[v];
            }
        }
    }
    for (int r = 0; r < MR; r++)
        for (int v = 0; v < 4; v++) store(s.records + (j + r) * RECORD + v * W, acc[r][v]);
}

// The cells of one tile of hidden units, from the sums that stand where the gates will: in two passes over the
// sequences, so that what is waited for in one is computed beside others.
template <class T, bool GRU> FK_INLINE void step_cells(const Step<T>& s, i64 rows, i64 u) {
    constexpr int W = Lanes<T>::W, RECORD = Cell<GRU>::RECORD * W;
    for (i64 j = 0; j < rows; j++) {
        T* gates = s.records + j * RECORD;
        if (GRU) {
            store(gates, sigmoid<T>(load(gates)));
            store(gates + W, sigmoid<T>(load(gates + W)));
        } else {
            Vec<T> in = sigmoid<T>(load(gates)), forget = sigmoid<T>(load(gates + W));
            Vec<T> fresh = tanh<T>(load(gates + 2 * W)), out = sigmoid<T>(load(gates + 3 * W));
            Vec<T> cell = in * fresh;
            if (s.before) cell += forget * load(s.before + j * RECORD + 4 * W);
            store(gates, in);
            store(gates + W, forget);
            store(gates + 2 * W, fresh);
            store(gates + 3 * W, out);
            store(gates + 4 * W, cell);
        }
    }
    for (i64 j = 0; j < rows; j++) {
        const i64 at = j * s.HP + u;
        T* gates = s.records + j * RECORD;
        if (GRU) {
            Vec<T> reset = load(gates), update = load(gates + W);
            Vec<T> fresh = tanh<T>(load(gates + 2 * W) + reset * load(gates + 3 * W));
            Vec<T> before = s.h_before ? load(s.h_before + at) : Vec<T>{};
            store(gates + 2 * W, fresh);
            store(s.h + at, fresh + update * (before - fresh));
        } else {
            store(s.h + at, load(gates + 3 * W) * tanh<T>(load(gates + 4 * W)));
        }
    }
}

template <class T, bool GRU> void step_rows(const Step<T>& s, i64 rows, i64 u) {
    i64 blocks = (rows + FK_MR - 1) / FK_MR;
    for (i64 j = 0; blocks > 0; blocks--) {
        i64 n = (rows - j + blocks - 1) / blocks;
        switch (n) {
            case 1: step_tile<T, GRU, 1>(s, j, u); break;
            case 2: step_tile<T, GRU, 2>(s, j, u); break;
            case 3: step_tile<T, GRU, 3>(s, j, u); break;
#if FK_MR == 6
            case 4: step_tile<T, GRU, 4>(s, j, u); break;
            case 5: step_tile<T, GRU, 5>(s, j, u); break;
            case 6: step_tile<T, GRU, 6>(s, j, u); break;
#endif
        }
        j += n;
    }
    step_cells<T, GRU>(s, rows, u);
}

// out (rows, GATES*HP) = bias + table rows times input weights; one row at a time in pairs of tiles.
template <class T, bool GRU>
void project(const T* table, const Used& used, i64 I, i64 HP, const T* panels, const T* bias, T* out) {
    constexpr int W = Lanes<T>::W, N = Cell<GRU>::GATES, MR = FK_MR;
    for (i64 u = 0; u < HP; u += W) {
        const T* panel = panels + u * I * N;
        for (i64 j = 0; j < used.count; j += MR) {
            const T* x[MR];
            for (int r = 0; r < MR; r++) x[r] = table + used.rows[least(j + r, used.count - 1)] * I;
            Vec<T> acc[MR][4];
            for (int r = 0; r < MR; r++)
                for (int v = 0; v < 4; v++) acc[r][v] = load(bias + v * HP + u);
            sum_x<T, GRU, MR>(acc, x, I, panel);
            for (int r = 0; r < MR && j + r < used.count; r++)
                for (int v = 0; v < N; v++) store(out + ((j + r) * N + v) * HP + u, acc[r][v]);
        }
    }
}

// ------------------------------------------------------------------------------------------------ forward

// What all steps leave for the backward pass, or what the last two left, where there is none. The records of a step lie
// one after another as they are written and read: tile by tile, and in a tile by sequence. The LSTM's hidden states are
// not kept: they follow from its records.
template <class T, bool GRU> struct Kept {
    static constexpr int RECORD = Cell<GRU>::RECORD;
    T* where;  // (B, HP): the steps of the greatest values

    Kept(const Call& call, const Task& task, i64 HP_, Arena* arena)
        : HP(HP_), B(task.plan.B), active(task.plan.active), offset(task.plan.offset), all(call.work), all_h(all && GRU) {
        if (all) {
            const i64 width = 5 * HP, whole = call.B * (call.L * width + (call.pool == GREATEST ? HP : 0));
            T* work = (T*)call.work + (task.g * call.D + task.d) * whole;
            records = work + task.plan.first * call.L * width;
            where = work + call.B * call.L * width + task.plan.first * HP;
        } else {
            records = take<T>(arena, 2 * B * RECORD * HP);
            where = take<T>(arena, B * HP);
        }
        h = all_h ? records + B * call.L * RECORD * HP : take<T>(arena, 2 * B * HP);
    }

    T* records_at(i64 t, i64 u) const {
        return records + ((all ? offset[t] : t % 2 * B) * HP + active[t] * u) * RECORD;
    }
    T* h_at(i64 t) const { return h + (all_h ? offset[t] : t % 2 * B) * HP; }

private:
    i64 HP, B;
    const i64 *active, *offset;
    bool all, all_h;
    T *records, *h;
};

// Takes the states of step t into the mean or the greatest so far; of equal values the first in time counts.
template <class T> void pool_step(i64 pool, i64 d, i64 t, i64 n, const T* h, T* pooled, T* where) {
    for (i64 i = 0; i < n; i += Lanes<T>::W) {
        Vec<T> value = load(h + i), so_far = load(pooled + i);
        if (pool == MEAN) {
            store(pooled + i, t ? so_far + value : value);
        } else if (t == 0) {
            store(pooled + i, value);
            store(where + i, Vec<T>{});
        } else {  // written so that a NaN wins
            auto keep = d == 0 ? value <= so_far : value < so_far;
            store(pooled + i, keep ? so_far : value);
            store(where + i, keep ? load(where + i) : splat<T>((T)t));
        }
    }
}

template <class T> const T* weight_of(const Call& c, const Task& task, int which) {
    return (const T*)c.weights[4 * task.d + which] + task.g * c.weight_strides[4 * task.d + which];
}

template <class T, bool GRU> void forward(const Call& c, i64 number, Arena* arena) {
    constexpr int W = Lanes<T>::W, N = Cell<GRU>::GATES;
    const Task task(c, number, arena);
    const Plan& p = task.plan;
    const i64 g = task.g, d = task.d, HP = Sizes<T>(c).HP, width = c.D * c.H;
    const size_t bytes = (size_t)c.H * sizeof(T);
    const Kept<T, GRU> kept(c, task, HP, arena);

    T* x_panels = take<T>(arena, HP * c.I * N);
    T* h_panels = take<T>(arena, HP * c.H * N);
    T* bias = take<T>(arena, 4 * HP);
    pack_panels<T, GRU>(weight_of<T>(c, task, 0), c.H, HP, c.I, x_panels);
    pack_panels<T, GRU>(weight_of<T>(c, task, 1), c.H, HP, c.H, h_panels);
    pack_bias<T, GRU>(weight_of<T>(c, task, 2), weight_of<T>(c, task, 3), c.H, HP, bias);

    const T* x = (const T*)c.x + g * c.x_stride;
    const i64* ids = c.ids + (c.ids ? g * c.ids_stride : 0);
    const T* projected = nullptr;
    Used used = {};
    if (c.ids) {
        used = find_used(c, p, g, arena);
        T* rows = take<T>(arena, used.count * N * HP);
        project<T, GRU>((const T*)c.table + g * c.table_stride, used, c.I, HP, x_panels, bias, rows);
        projected = rows;
    }

    T* output = (T*)c.output + g * c.B * c.L * width + d * c.H;
    T* result = (T*)c.pooled + g * c.B * width + d * c.H;
    T* pooled = take<T>(arena, p.B * HP);
    const T** inputs = take<const T*>(arena, p.B);
    i64* cells = take<i64>(arena, p.B);
    for (i64 t = 0; t < p.steps; t++) {
        const i64 n = p.active[t], going_on = t + 1 < p.steps ? p.active[t + 1] : 0;
        for (i64 j = 0; j < n; j++) {
            cells[j] = cell_of(c, p, d, j, t);
            inputs[j] = projected ? projected + used.slot[ids[cells[j]]] * N * HP : x + cells[j] * c.I;
        }
        Step<T> s;
        s.bias = bias;
        s.I = c.I, s.H = c.H, s.HP = HP;
        s.x = inputs;
        s.h = kept.h_at(t), s.h_before = t ? kept.h_at(t - 1) : nullptr;
        for (i64 u = 0; u < HP; u += W) {
            s.records = kept.records_at(t, u), s.before = t ? kept.records_at(t - 1, u) : nullptr;
            s.next = u + W < HP ? kept.records_at(t, u + W) : going_on ? kept.records_at(t + 1, 0) : s.records;
            s.x_panel = projected ? nullptr : x_panels + u * c.I * N;
            s.h_panel = h_panels + u * c.H * N;
            step_rows<T, GRU>(s, n, u);
        }
        for (i64 j = 0; j < n && c.output; j++) __builtin_memcpy(output + cells[j] * width, s.h + j * HP, bytes);
        if (c.pool != LAST) pool_step(c.pool, d, t, n * HP, s.h, pooled, kept.where);
        for (i64 j = going_on; j < n; j++) {
            T* to = result + p.order[j] * width;
            __builtin_memcpy(to, c.pool == LAST ? s.h + j * HP : pooled + j * HP, bytes);
            for (i64 i = 0; i < c.H && c.pool == MEAN; i++) to[i] /= (T)p.length[j];
        }
    }
    for (i64 j = 0; j < p.B && c.output; j++)
        for (i64 t = p.length[j]; t < c.L; t++) __builtin_memset(output + (p.order[j] * c.L + t) * width, 0, bytes);
}

// ------------------------------------------------------------------------------------------------ backward

// Weights (GATES*H, K) to (GATES*HP, KP), gates in the order of the gate gradients, padded with zeros.
template <class T> T* pad_weight(const T* weight, const int* gate_at, int gates, i64 H, i64 HP, i64 K, i64 KP, Arena* arena) {
    T* out = take_zeros<T>(arena, gates * HP * KP);
    for (int s = 0; s < gates; s++)
        for (i64 u = 0; u < H; u++)
            __builtin_memcpy(out + (s * HP + u) * KP, weight + (gate_at[s] * H + u) * K, (size_t)K * sizeof(T));
    return out;
}

template <class T> void unpad_weight(const T* from, const int* gate_at, int gates, i64 H, i64 HP, i64 K, i64 KP, T* grad) {
    for (int s = 0; s < gates; s++)
        for (i64 u = 0; u < H; u++)
            __builtin_memcpy(grad + (gate_at[s] * H + u) * K, from + (s * HP + u) * KP, (size_t)K * sizeof(T));
}

template <class T> struct Back {
    i64 n, going_on, H, HP;  // sequences of this step; those that have a further step
    i64 row, h_row;  // from one row of gate gradients, and of hidden states, to the next
    i64 u;
    const T *records, *before, *h_before;  // of one tile, as in Step
    const T* const* grad_out;  // (n,) rows of H, null where the outputs' gradient is not given
    const T *grad_greatest, *where;  // (n, HP), null where the greatest values' gradient is not given
    T step;
    T *grad_h, *grad_c;  // (n, HP): in: what step t + 1 sent; out: what goes to step t - 1 beside the product
    T* squashed;  // (n, HP), LSTM: tanh of the cell states; in: of those that go on; out: of the step before
    T *grad_gates, *h;  // (n, 4*HP), rows apart; out: (n, HP) hidden states of the step before, rows apart
    T* grad_bias;  // (4, HP)
};

// The cells of one tile of hidden units, backwards.
template <class T, bool GRU> FK_INLINE void back_cells(const Back<T>& s) {
    constexpr int W = Lanes<T>::W, RECORD = Cell<GRU>::RECORD * W;
    const i64 HP = s.HP, u = s.u;
    Vec<T> sum[4];
    for (int v = 0; v < 4; v++) sum[v] = load(s.grad_bias + v * HP + u);
    for (i64 j = 0; j < s.n; j++) {
        const T* gates = s.records + j * RECORD;
        const i64 at = j * HP + u;
        Vec<T> dh = load(s.grad_h + at), grad[4], h_before = Vec<T>{};
        if (s.grad_out) dh += load_part(s.grad_out[j] + u, s.H - u);
        if (s.where) dh += load(s.where + at) == s.step ? load(s.grad_greatest + at) : Vec<T>{};
        if (GRU) {
            Vec<T> reset = load(gates), update = load(gates + W), fresh = load(gates + 2 * W);
            if (s.before) h_before = load(s.h_before + at);
            Vec<T> dn = dh * (T(1) - update) * (T(1) - fresh * fresh);
            grad[0] = dn;
            grad[1] = dn * load(gates + 3 * W) * reset * (T(1) - reset);
            grad[2] = dh * (h_before - fresh) * update * (T(1) - update);
            grad[3] = dn * reset;
            store(s.grad_h + at, dh * update);
        } else {
            Vec<T> in = load(gates), forget = load(gates + W), fresh = load(gates + 2 * W), out = load(gates + 3 * W);
            Vec<T> squashed = j < s.going_on ? load(s.squashed + at) : tanh<T>(load(gates + 4 * W));
            Vec<T> dc = load(s.grad_c + at) + dh * out * (T(1) - squashed * squashed);
            grad[0] = dc * fresh * in * (T(1) - in);
            grad[1] = Vec<T>{};
            grad[2] = dc * in * (T(1) - fresh * fresh);
            grad[3] = dh * squashed * out * (T(1) - out);
            if (s.before) {
                Vec<T> cell = load(s.before + j * RECORD + 4 * W), flat = tanh<T>(cell);
                grad[1] = dc * cell * forget * (T(1) - forget);
                h_before = load(s.before + j * RECORD + 3 * W) * flat;
                store(s.squashed + at, flat);
            }
            store(s.grad_c + at, dc * forget);
        }
        store(s.h + j * s.h_row + u, h_before);
        for (int v = 0; v < 4; v++) {
            store(s.grad_gates + j * s.row + v * HP + u, grad[v]);
            sum[v] += grad[v];
        }
    }
    for (int v = 0; v < 4; v++) store(s.grad_bias + v * HP + u, sum[v]);
}

// A distance between rows that are read one below the other: by a power of two they would share few cache lines.
template <class T> constexpr i64 apart(i64 n) { return n + 64 / (i64)sizeof(T); }

constexpr i64 BLOCK = 128;  // rows of gate gradients: enough for a good matrix product, few enough for the cache

// Gradient of the input weights and of the inputs, from gate gradients (rows, ld) and inputs (rows, IP).
template <class T, bool GRU>
void back_inputs(i64 rows, const T* grad_gates, i64 ld, const T* x, i64 HP, i64 IP, const T* w_ih, T* grad_w, T* grad_x) {
    constexpr int N = Cell<GRU>::GATES;
    for (i64 r = 0; r < rows; r += BLOCK)  // what one product reads stays in cache
        product<T, true>(N * HP, IP, least(BLOCK, rows - r), grad_gates + r * ld, ld, x + r * IP, IP, grad_w, IP, true);
    if (grad_x) product<T, false>(rows, IP, N * HP, grad_gates, ld, w_ih, IP, grad_x, IP, false);
}

template <class T, bool GRU> void backward(const Call& c, i64 number, Arena* arena) {
    typedef Cell<GRU> C;
    constexpr int N = C::GATES;
    const Task task(c, number, arena);
    const Plan& p = task.plan;
    const i64 g = task.g, d = task.d, HP = Sizes<T>(c).HP, IP = Sizes<T>(c).IP, width = c.D * c.H;
    const Kept<T, GRU> kept(c, task, HP, arena);
    const i64* ids = c.ids + (c.ids ? g * c.ids_stride : 0);
    const T* x = (const T*)c.x + g * c.x_stride;
    const T* table = (const T*)c.table + g * c.table_stride;

    T* w_hh = pad_weight(weight_of<T>(c, task, 1), C::h_gate, N, c.H, HP, c.H, apart<T>(HP), arena);
    T* w_ih = pad_weight(weight_of<T>(c, task, 0), C::x_gate, N, c.H, HP, c.I, IP, arena);
    T* grad_w_hh = take_zeros<T>(arena, N * HP * HP);
    T* grad_w_ih = take_zeros<T>(arena, N * HP * IP);
    T* grad_bias = take_zeros<T>(arena, 4 * HP);
    T* grad_h = take_zeros<T>(arena, p.B * HP);
    T* grad_c = take_zeros<T>(arena, p.B * HP);
    T* squashed = take<T>(arena, GRU ? 0 : p.B * HP);
    const T** grad_out = take<const T*>(arena, p.B);
    T* grad_pooled = c.grad_pooled ? take_zeros<T>(arena, p.B * HP) : nullptr;
    for (i64 j = 0; j < p.B && grad_pooled; j++) {
        const T* from = (const T*)c.grad_pooled + (g * c.B + p.order[j]) * width + d * c.H;
        const T share = c.pool == MEAN ? (T)p.length[j] : T(1);  // the mean sends every step the same
        for (i64 i = 0; i < c.H; i++) grad_pooled[j * HP + i] = from[i] / share;
        grad_out[j] = grad_pooled + j * HP;
    }

    Used used = {};
    T* grad_projected = nullptr;
    if (c.ids) {
        used = find_used(c, p, g, arena);
        grad_projected = take_zeros<T>(arena, used.count * N * HP);
    }

    const i64 LG = apart<T>(4 * HP), LH = apart<T>(HP);
    const i64 room = BLOCK > CHUNK ? BLOCK : CHUNK;  // gate gradients wait in a block until it is full
    T* block = take<T>(arena, room * LG);
    T* block_h = take<T>(arena, room * LH);
    T* block_x = take_zeros<T>(arena, c.ids ? 0 : room * IP);
    T* block_grad_x = take<T>(arena, c.ids ? 0 : room * IP);
    i64* block_cell = take<i64>(arena, room);
    T* grad_input = (T*)c.grad_input;
    if (grad_input) grad_input += ((c.ids ? task.chunk * c.D + d : d) * c.G + g) * (c.ids ? c.V : c.B * c.L) * c.I;

    i64 filled = 0;
    for (i64 t = p.steps - 1; t >= -1; t--) {
        const i64 n = t >= 0 ? p.active[t] : 0;
        if (t < 0 || filled + n > room) {  // empty the block
            product<T, true>(N * HP, HP, filled, block + C::h_first * HP, LG, block_h, LH, grad_w_hh, HP, true);
            if (grad_projected) {
                for (i64 r = 0; r < filled; r++) {
                    T* to = grad_projected + used.slot[ids[block_cell[r]]] * N * HP;
                    const T* from = block + r * LG;
                    for (i64 k = 0; k < N * HP; k += Lanes<T>::W) store(to + k, load(to + k) + load(from + k));
                }
            } else {
                back_inputs<T, GRU>(filled, block, LG, block_x, HP, IP, w_ih, grad_w_ih, grad_input ? block_grad_x : nullptr);
                if (grad_input)
                    for (i64 r = 0; r < filled; r++)
                        __builtin_memcpy(grad_input + block_cell[r] * c.I, block_grad_x + r * IP, (size_t)c.I * sizeof(T));
            }
            filled = 0;
        }
        if (t < 0) break;

        const i64 ended = t + 1 < p.steps ? p.active[t + 1] : 0;  // sequences from here on have their last step now
        for (i64 j = ended; j < n && c.pool == LAST && grad_pooled; j++)
            __builtin_memcpy(grad_h + j * HP, grad_pooled + j * HP, (size_t)HP * sizeof(T));
        for (i64 j = 0; j < n; j++) {
            i64 cell = cell_of(c, p, d, j, t);
            block_cell[filled + j] = cell;
            if (c.grad_output) grad_out[j] = (const T*)c.grad_output + ((g * c.B * c.L) + cell) * width + d * c.H;
            if (!c.ids) __builtin_memcpy(block_x + (filled + j) * IP, x + cell * c.I, (size_t)c.I * sizeof(T));
        }
        Back<T> s;
        s.n = n, s.going_on = ended, s.H = c.H, s.HP = HP;
        s.h_before = GRU && t ? kept.h_at(t - 1) : nullptr;
        s.grad_out = c.grad_output || (c.pool == MEAN && grad_pooled) ? grad_out : nullptr;
        s.where = c.pool == GREATEST && grad_pooled ? kept.where : nullptr;
        s.grad_greatest = grad_pooled;
        s.step = (T)t;
        s.grad_h = grad_h, s.grad_c = grad_c, s.squashed = squashed;
        s.row = LG, s.grad_gates = block + filled * LG;
        s.h_row = LH, s.h = block_h + filled * LH;
        s.grad_bias = grad_bias;
        for (s.u = 0; s.u < HP; s.u += Lanes<T>::W) {
            s.records = kept.records_at(t, s.u), s.before = t ? kept.records_at(t - 1, s.u) : nullptr;
            back_cells<T, GRU>(s);
        }
        if (t) {  // meanwhile what is read two steps from now comes nearer
            Ahead<T> ahead = {kept.records_at(t > 1 ? t - 2 : 0, 0), t > 1 ? p.active[t - 2] * HP * C::RECORD : 0, 0};
            if (GRU && t > 1) prefetch(kept.h_at(t - 2), p.active[t - 2] * HP);
            product<T, false, true>(n, HP, N * HP, s.grad_gates + C::h_first * HP, LG, w_hh, LH, grad_h, HP, GRU, ahead);
        }
        filled += n;
    }

    if (c.ids) {
        T* rows = take_zeros<T>(arena, used.count * IP);
        T* grad_rows = take<T>(arena, used.count * IP);
        for (i64 r = 0; r < used.count; r++)
            __builtin_memcpy(rows + r * IP, table + used.rows[r] * c.I, (size_t)c.I * sizeof(T));
        back_inputs<T, GRU>(used.count, grad_projected, N * HP, rows, HP, IP, w_ih, grad_w_ih, grad_input ? grad_rows : nullptr);
        if (grad_input)
            for (i64 r = 0; r < used.count; r++)
                __builtin_memcpy(grad_input + used.rows[r] * c.I, grad_rows + r * IP, (size_t)c.I * sizeof(T));
    }

    T* const* grads = (T* const*)c.grad_weights + 4 * d;
    const i64 copy = task.chunk * c.G + g;
    unpad_weight(grad_w_ih, C::x_gate, N, c.H, HP, c.I, IP, grads[0] + copy * N * c.H * c.I);
    unpad_weight(grad_w_hh, C::h_gate, N, c.H, HP, c.H, HP, grads[1] + copy * N * c.H * c.H);
    unpad_weight(grad_bias, C::x_gate, N, c.H, HP, 1, 1, grads[2] + copy * N * c.H);
    unpad_weight(grad_bias + C::h_first * HP, C::h_gate, N, c.H, HP, 1, 1, grads[3] + copy * N * c.H);
}

template <class T> void add_to_first(T* first, i64 begin, i64 end, i64 distance, i64 copies) {
    for (i64 copy = 1; copy < copies; copy++)
        for (i64 i = begin; i < end; i++) first[i] += first[copy * distance + i];
}

// Adds up what directions and chunks found apart, in one order.
template <class T, bool GRU> void add_copies(const Call& c, i64 g, Arena* arena) {
    const i64 N = Cell<GRU>::GATES, chunks = chunks_of(c.B);
    const i64 sizes[4] = {N * c.H * c.I, N * c.H * c.H, N * c.H, N * c.H};
    for (int w = 0; w < 4 * c.D && chunks > 1; w++)
        add_to_first((T*)c.grad_weights[w], g * sizes[w % 4], (g + 1) * sizes[w % 4], c.G * sizes[w % 4], chunks);
    if (!c.grad_input) return;
    const Plan p = whole_plan(c, g, arena);
    const i64 size = (c.ids ? c.V : c.B * c.L) * c.I;
    T* first = (T*)c.grad_input;
    if (c.ids) {
        const Used used = find_used(c, p, g, arena);
        for (i64 r = 0; r < used.count; r++) {
            i64 at = g * size + used.rows[r] * c.I;
            add_to_first(first, at, at + c.I, c.G * size, chunks * c.D);
        }
    } else {
        for (i64 j = 0; j < c.B; j++) {
            i64 at = g * size + p.order[j] * c.L * c.I;
            add_to_first(first, at, at + p.length[j] * c.I, c.G * size, c.D);
        }
    }
}

constexpr i64 PEAK_ROUNDS = 1 << 20, PEAK_CHAINS = 12;

// Nothing but multiply-adds in registers, in independent chains: what the processor can do at most.
template <class T> void peak(Arena* arena) {
    T* memory = take<T>(arena, PEAK_CHAINS * Lanes<T>::W);
    volatile T unknown = T(0.5);  // so that the compiler cannot do the sum
    const Vec<T> a = splat<T>(unknown), b = splat<T>(unknown);
    Vec<T> sums[PEAK_CHAINS];
    for (int i = 0; i < PEAK_CHAINS; i++) sums[i] = splat<T>(unknown);
    for (i64 round = 0; round < PEAK_ROUNDS; round++)
        for (int i = 0; i < PEAK_CHAINS; i++) sums[i] = sums[i] * a + b;
    for (int i = 0; i < PEAK_CHAINS; i++) store(memory + i * Lanes<T>::W, sums[i]);
}

template <class T, bool GRU> void run(const Call& c, int phase, i64 task, Arena* arena) {
    if (phase == PEAK) peak<T>(arena);
    if (phase == FORWARD) forward<T, GRU>(c, task, arena);
    if (phase == BACKWARD) backward<T, GRU>(c, task, arena);
    if (phase == ADD_COPIES) add_copies<T, GRU>(c, task, arena);
}

}  // namespace

void FK_RUN(const void* call, int phase, i64 task, Arena* arena) {
    const Call* c = (const Call*)call;
    if (c->gru)
        c->is_double ? run<double, true>(*c, phase, task, arena) : run<float, true>(*c, phase, task, arena);
    else
        c->is_double ? run<double, false>(*c, phase, task, arena) : run<float, false>(*c, phase, task, arena);
}

}  // namespace recurrent
}  // namespace fk
