// Convolution, ReLU and max-pool, compiled once per instruction set; convolution.h says what and how it is divided.

#include "convolution.h"
#include "vectors.h"

#define FK_APART __attribute__((noinline))  // so that each has the registers to itself

namespace fk {
namespace convolution {
namespace {

#if defined(FK_LEVEL_AVX512)
constexpr int SUMS = 24, GATHERED = 25;  // vectors that a product keeps in registers, and a sum over places
#else
constexpr int SUMS = 12, GATHERED = 12;
#endif

template <class T> FK_INLINE T* at(const void* base, i64 offset) { return (T*)base + offset; }

// ------------------------------------------------------------------------------------------------ forward

constexpr int WIDEST = FK_BYTES == 64 ? 4 : 2;  // vectors of output channels in one tile

// The first vector of a panel of output channels, and how many it has.
struct Panel {
    i64 first;
    int count;
};

FK_INLINE Panel panel_at(i64 first, i64 vectors) { return {first, (int)least(WIDEST, vectors - first)}; }

// Weights (O, C, K, K) to panels (NB, K, K, CB, output channels of the panel).
template <class T> void pack_forward(const Job& job, i64 g) {
    constexpr i64 L = Lanes<T>::W;
    const Call& c = *job.call;
    const Shape s(c);
    const i64 OV = vectors(c.O, L), size = forward_size(c, L);
    const T* weight = at<T>(c.weight, g * c.weight_stride);
    T* packed = at<T>(job.weights, g * size);
    __builtin_memset(packed, 0, (size_t)size * sizeof(T));
    for (i64 v = 0; v < OV;) {
        const Panel p = panel_at(v, OV);
        T* panel = packed + v * L * s.NB * c.K * c.K * s.CB;
        const i64 width = p.count * L;
        for (i64 o = v * L; o < least(c.O, (v + p.count) * L); o++)
            for (i64 i = 0; i < c.C; i++) {
                const T* from = weight + (o * c.C + i) * c.K * c.K;
                T* to = panel + ((i / s.CB) * c.K * c.K * s.CB + i % s.CB) * width + o - v * L;
                for (i64 k = 0; k < c.K * c.K; k++) to[k * s.CB * width] = from[k];
            }
        v += p.count;
    }
}

// One client's image to (NB, HP, WP, CB); see convolution.h.
template <class T, class From>
void pack_pixels(const Call& c, const Shape& s, const From* x, const T* table, T* packed) {
    const i64 *stride = c.x_strides;
    const i64 top = least(c.padding, s.HP), left = least(c.padding, s.WP);
    const i64 bottom = least(c.H + top, s.HP), right = least(c.W + left, s.WP);
    for (i64 b = 0; b < s.NB; b++) {
        const i64 first = b * s.CB, count = least(s.CB, c.C - first);
        T* block = packed + b * s.block();
        if (c.padding > 0 || count < s.CB) __builtin_memset(block, 0, (size_t)s.block() * sizeof(T));
        for (i64 y = top; y < bottom; y++) {
            const From* row = x + first * stride[2] + (y - top) * stride[3];
            T* to = block + (y * s.WP + left) * s.CB;
            if (stride[2] == 1 && sizeof(From) == sizeof(T)) {
                for (i64 q = left; q < right; q++, row += stride[4], to += s.CB)
                    for (i64 i = 0; i < count; i++) to[i] = T(row[i]);
            } else {
                for (i64 i = 0; i < count; i++) {
                    const From* from = row + i * stride[2];
                    for (i64 q = 0; q < right - left; q++) {
                        From value = from[q * stride[4]];
                        to[q * s.CB + i] = sizeof(From) == 1 ? table[(uint8_t)value] : T(value);
                    }
                }
            }
        }
    }
    __builtin_memset(packed + s.NB * s.block(), 0, 64 * sizeof(T));
}

template <class T> FK_APART void pack_image(const Call& c, const Shape& s, i64 g, i64 image, T* packed) {
    const i64 offset = g * c.x_strides[0] + image * c.x_strides[1];
    if (c.bytes) {
        T table[256];
        for (int i = 0; i < 256; i++) table[i] = T(i) / T(127.5) - T(1);
        pack_pixels<T>(c, s, at<uint8_t>(c.x, offset), table, packed);
    } else {
        pack_pixels<T>(c, s, at<T>(c.x, offset), (const T*)nullptr, packed);
    }
}

// MR neighbouring pixels times NV vectors of output channels: all products of the kernel, summed in registers.
// `offsets` says where the pixels under the kernel are; FIXED is the number of channels in a block, or 0 for CB.
template <class T, int MR, int NV, int FIXED>
FK_INLINE void product_tile(const T* x, const T* w, const i64* offsets, i64 count, i64 CB, const T* bias, T* out) {
    constexpr int L = Lanes<T>::W;
    const i64 step = FIXED ? FIXED : CB;
    Vec<T> acc[MR][NV];
    for (int v = 0; v < NV; v++) {
        Vec<T> b = load(bias + v * L);
        for (int r = 0; r < MR; r++) acc[r][v] = b;
    }
    for (i64 k = 0; k < count; k++) {
        const T* from = x + offsets[k];
#pragma GCC unroll 4
        for (i64 i = 0; i < step; i++, w += NV * L) {
            Vec<T> wide[NV];
            for (int v = 0; v < NV; v++) wide[v] = load(w + v * L);
            for (int r = 0; r < MR; r++) {
                Vec<T> a = splat<T>(from[r * step + i]);
                for (int v = 0; v < NV; v++) acc[r][v] += a * wide[v];
            }
        }
    }
    for (int r = 0; r < MR; r++)
        for (int v = 0; v < NV; v++) store(out + (r * NV + v) * L, acc[r][v]);
}

template <class T, int NV> struct Products {
    const Call& c;
    const Shape& s;
    const i64* offsets;

    // A row of pixels.
    template <int FIXED> void row(const T* x, const T* w, const T* bias, T* out) const {
        constexpr int MR = least(FIXED ? 12 : 8, SUMS / NV);  // more would need more addresses than there are registers
        const i64 pixels = 2 * s.PW;
        i64 blocks = (pixels + MR - 1) / MR;
        for (i64 done = 0; blocks > 0; blocks--) {
            const i64 n = (pixels - done + blocks - 1) / blocks;  // even blocks: 16 pixels are 6 + 5 + 5
            tile<MR, FIXED>(n, x + done * s.CB, w, bias, out + done * NV * Lanes<T>::W);
            done += n;
        }
    }

    template <int N, int FIXED> FK_INLINE void tile(i64 n, const T* x, const T* w, const T* bias, T* out) const {
        if (n == N) return product_tile<T, N, NV, FIXED>(x, w, offsets, s.NB * c.K * c.K, s.CB, bias, out);
        if constexpr (N > 1) tile<N - 1, FIXED>(n, x, w, bias, out);
    }

    void any_row(const T* x, const T* w, const T* bias, T* out) const {
        if (sizeof(T) == 4 && s.CB == 1) return row<1>(x, w, bias, out);  // images, and blocks of many channels
        if (sizeof(T) == 4 && s.CB == 3) return row<3>(x, w, bias, out);
        if (sizeof(T) == 4 && s.CB == 16) return row<16>(x, w, bias, out);
        row<0>(x, w, bias, out);
    }

    // The greatest of each four pixels, if above 0, and which it is; as torch the first of equals, and NaN above all.
    void pool(const T* rows, i64 first, i64 py, T* output, uint8_t* places) const {
        constexpr int L = Lanes<T>::W;
        typedef typename Lanes<T>::Bits Bits;
        typedef uint8_t Bytes __attribute__((vector_size(Lanes<T>::W)));
        const i64 *stride = c.output_strides, width = 2 * s.PW * NV * L;
        for (i64 px = 0; px < s.PW; px++)
            for (int v = 0; v < NV; v++) {
                const T* from = rows + (2 * px * NV + v) * L;
                Vec<T> best = load(from);
                Bits place = {};
                for (int k = 1; k < 4; k++) {
                    Vec<T> value = load(from + (k & 1) * NV * L + (k >> 1) * width);
                    Bits better = (Bits)(value > best) | (Bits)(value != value);
                    best = better ? value : best;
                    place = better ? Bits{} + k : place;
                }
                Bits off = (Bits)(best <= T(0));
                best = off ? Vec<T>{} : best;
                place = off ? Bits{} + 4 : place;
                const i64 o = first + v * L, count = least(L, c.O - o);
                T* to = output + py * stride[3] + px * stride[4] + o * stride[2];
                if (stride[2] == 1) {
                    store_part(to, best, count);
                } else {
                    for (i64 i = 0; i < count; i++) to[i * stride[2]] = best[i];
                }
                if (places) {
                    Bytes small = __builtin_convertvector(place, Bytes);
                    __builtin_memcpy(places + (py * s.PW + px) * c.O + o, &small, (size_t)count);
                }
            }
    }

    void image(const T* x, i64 first, const T* panel, const T* bias, T* rows, T* output, uint8_t* places) const {
        for (i64 py = 0; py < s.PH; py++) {
            for (i64 y = 0; y < 2; y++)
                any_row(x + (2 * py + y) * s.WP * s.CB, panel, bias + first, rows + y * 2 * s.PW * NV * Lanes<T>::W);
            pool(rows, first, py, output, places);
        }
    }
};

template <class T> void forward(const Job& job, i64 task, Arena* arena) {
    constexpr i64 L = Lanes<T>::W;
    const Call& c = *job.call;
    const Shape s(c);
    const i64 g = task / c.B, image = task % c.B, OV = vectors(c.O, L);
    T* x = c.kept ? at<T>(c.kept, task * s.kept_size(c)) : take<T>(arena, s.packed_size());
    T* rows = take<T>(arena, 2 * 2 * s.PW * WIDEST * L);
    T* bias = take_zeros<T>(arena, OV * L);
    i64* offsets = take<i64>(arena, s.NB * c.K * c.K);
    for (i64 k = 0; k < s.NB * c.K * c.K; k++)
        offsets[k] = k / (c.K * c.K) * s.block() + (k / c.K % c.K * s.WP + k % c.K) * s.CB;
    __builtin_memcpy(bias, at<T>(c.bias, g * c.bias_stride), (size_t)c.O * sizeof(T));
    pack_image<T>(c, s, g, image, x);
    T* output = at<T>(c.output, g * c.output_strides[0] + image * c.output_strides[1]);
    uint8_t* places = c.kept ? (uint8_t*)(x + s.packed_size()) : nullptr;
    const T* weights = at<T>(job.weights, g * forward_size(c, L));
    for (i64 v = 0; v < OV;) {
        const Panel p = panel_at(v, OV);
        const T* panel = weights + v * L * s.NB * c.K * c.K * s.CB;
        switch (p.count) {
            case 1: Products<T, 1>{c, s, offsets}.image(x, v * L, panel, bias, rows, output, places); break;
            case 2: Products<T, 2>{c, s, offsets}.image(x, v * L, panel, bias, rows, output, places); break;
#if FK_BYTES == 64
            case 3: Products<T, 3>{c, s, offsets}.image(x, v * L, panel, bias, rows, output, places); break;
            case 4: Products<T, 4>{c, s, offsets}.image(x, v * L, panel, bias, rows, output, places); break;
#endif
        }
        v += p.count;
    }
}

// ------------------------------------------------------------------------------------------------ backward

// A row of the kernel meets K * CB numbers, RV vectors. The K rows are cut into pieces that fit into registers:
// NK rows of NV vectors. Packed weights and their gradients lie in the order (NB, piece, O, NK, NV, L).
struct Pieces {
    i64 K, RV, rows, wide;  // how many rows and vectors a piece has at most

    bool one() const { return rows == K && wide == RV; }

    template <class T> static Pieces of(const Call& c, const Shape& s) {
        Pieces p;
        p.K = c.K, p.RV = vectors(c.K * s.CB, Lanes<T>::W);
        const i64 parts = vectors(p.RV, least(GATHERED, 12));
        p.wide = vectors(p.RV, parts);
        p.rows = parts > 1 ? 1 : vectors(p.K, vectors(p.K, least(5, GATHERED / p.RV)));
        return p;
    }
};

// One piece: `row` and `vector` are its first, `offset` its place among the pieces of a block, in vectors per output.
struct Piece {
    i64 row, vector, rows, wide, offset;
};

template <class Visit> FK_INLINE void each_piece(const Pieces& p, Visit visit) {
    i64 offset = 0;
    for (i64 row = 0; row < p.K; row += p.rows)
        for (i64 vector = 0; vector < p.RV; vector += p.wide) {
            Piece piece{row, vector, least(p.rows, p.K - row), least(p.wide, p.RV - vector), offset};
            visit(piece);
            offset += piece.rows * piece.wide;
        }
}

// A gradient and where it belongs: an offset in the packed image, or an output channel.
template <class T> struct Entry {
    T grad;
    int32_t at;
};

// The value, or 0 where the ReLU is 0; without a branch, which would be guessed wrong too often.
FK_INLINE float if_live(float value, i64 place) {
    int32_t bits;
    __builtin_memcpy(&bits, &value, 4);
    bits &= -(int32_t)(place < 4);
    __builtin_memcpy(&value, &bits, 4);
    return value;
}

FK_INLINE double if_live(double value, i64 place) {
    int64_t bits;
    __builtin_memcpy(&bits, &value, 8);
    bits &= -(int64_t)(place < 4);
    __builtin_memcpy(&value, &bits, 8);
    return value;
}

// Gradients of the weights that one output channel has in one piece: the pixels around each place, times its gradient.
template <class T, int NK, int NV> void gather(const Entry<T>* list, i64 count, const T* x, i64 row, T* sums) {
    constexpr int L = Lanes<T>::W;
    Vec<T> acc[NK][NV];
    for (int k = 0; k < NK; k++)
        for (int v = 0; v < NV; v++) acc[k][v] = load(sums + (k * NV + v) * L);
    for (i64 e = 0; e < count; e++) {
        const T* from = x + list[e].at;
        const Vec<T> grad = splat<T>(list[e].grad);
        for (int k = 0; k < NK; k++)
            for (int v = 0; v < NV; v++) acc[k][v] += grad * load(from + k * row + v * L);
    }
    for (int k = 0; k < NK; k++)
        for (int v = 0; v < NV; v++) store(sums + (k * NV + v) * L, acc[k][v]);
}

// Where the gradients of one output channel are, and which of four pixels each belongs to.
template <class T> struct Source {
    const T* grad;
    const uint8_t* places;
    i64 rows, columns, row_stride, column_stride, place_stride;
    i64 right, down;  // from pixel to pixel in the packed image
};

// The same without a list, where there is one piece and a list would be read only once; returns the sum of gradients.
template <class T, int NK, int NV> T gather_all(const Source<T>& s, const T* x, T* sums) {
    constexpr int L = Lanes<T>::W;
    const i64 offsets[5] = {0, s.right, s.down, s.down + s.right, 0};
    const i64 columns = s.columns, column_stride = s.column_stride, place_stride = s.place_stride, down = s.down;
    const i64 right = 2 * s.right;
    const uint8_t* place = s.places;
    Vec<T> acc[NK][NV];
    T total = 0;
    for (int k = 0; k < NK; k++)
        for (int v = 0; v < NV; v++) acc[k][v] = load(sums + (k * NV + v) * L);
    for (i64 py = 0; py < s.rows; py++) {
        const T *corner = x + 2 * py * down, *value = s.grad + py * s.row_stride;
        for (i64 px = 0; px < columns; px++, place += place_stride, value += column_stride, corner += right) {
            const i64 which = *place;
            const T* from = corner + offsets[which];
            const T one = if_live(*value, which);
            const Vec<T> grad = splat<T>(one);
            for (int k = 0; k < NK; k++)
                for (int v = 0; v < NV; v++) acc[k][v] += grad * load(from + k * down + v * L);
            total += one;
        }
    }
    for (int k = 0; k < NK; k++)
        for (int v = 0; v < NV; v++) store(sums + (k * NV + v) * L, acc[k][v]);
    return total;
}

// Gradients of the pixels around one place, in one piece: the weights of the output channels there, times theirs.
template <class T, int NK, int NV> void scatter(const Entry<T>* list, i64 count, const T* weights, i64 row, T* x) {
    constexpr int L = Lanes<T>::W;
    Vec<T> acc[NK][NV];
    for (int k = 0; k < NK; k++)
        for (int v = 0; v < NV; v++) acc[k][v] = load(x + k * row + v * L);
    for (i64 e = 0; e < count; e++) {
        const T* from = weights + list[e].at * (NK * NV * L);
        const Vec<T> grad = splat<T>(list[e].grad);
        for (int k = 0; k < NK; k++)
            for (int v = 0; v < NV; v++) acc[k][v] += grad * load(from + (k * NV + v) * L);
    }
    for (int k = 0; k < NK; k++)
        for (int v = 0; v < NV; v++) store(x + k * row + v * L, acc[k][v]);
}

template <class T> struct Gather {
    typedef void (*Function)(const Entry<T>*, i64, const T*, i64, T*);
    template <int NK, int NV> static constexpr Function of() { return gather<T, NK, NV>; }
};

template <class T> struct GatherAll {
    typedef T (*Function)(const Source<T>&, const T*, T*);
    template <int NK, int NV> static constexpr Function of() { return gather_all<T, NK, NV>; }
};

template <class T> struct Scatter {
    typedef void (*Function)(const Entry<T>*, i64, const T*, i64, T*);
    template <int NK, int NV> static constexpr Function of() { return scatter<T, NK, NV>; }
};

// The function for a piece of this size, from all that a Pieces may ask for.
template <class Kind, int NK = 5, int NV = 12> typename Kind::Function choose(i64 rows, i64 wide) {
    if constexpr (NK * NV <= GATHERED) {
        if (rows == NK && wide == NV) return Kind::template of<NK, NV>();
    }
    if constexpr (NV > 1)
        return choose<Kind, NK, NV - 1>(rows, wide);
    else if constexpr (NK > 1)
        return choose<Kind, NK - 1, 12>(rows, wide);
    else
        return nullptr;
}

// Weights (O, C, K, K) to the order of the pieces, or (back) gradients of the weights from there.
template <class T, bool BACK> FK_APART void reorder(const Call& c, const Shape& s, T* weight, T* packed) {
    constexpr i64 L = Lanes<T>::W;
    const Pieces p = Pieces::of<T>(c, s);
    if (!BACK) __builtin_memset(packed, 0, (size_t)backward_size(c, L) * sizeof(T));
    for (i64 b = 0; b < s.NB; b++)
        each_piece(p, [&](const Piece& piece) {
            T* start = packed + (b * c.K * p.RV + piece.offset) * c.O * L;
            const i64 size = piece.rows * piece.wide * L, low = piece.vector * L, high = low + piece.wide * L;
            const i64 live = least(s.CB, c.C - b * s.CB);
            for (i64 o = 0; o < c.O; o++)
                for (i64 k = 0; k < piece.rows; k++) {
                    T* row = start + o * size + k * piece.wide * L - low;
                    for (i64 kx = 0; kx < c.K; kx++) {
                        T* place = weight + ((o * c.C + b * s.CB) * c.K + piece.row + k) * c.K + kx;
                        const i64 first = kx * s.CB, begin = least(live, low > first ? low - first : 0);
                        for (i64 i = begin; i < least(live, high - first); i++) {
                            T &one = place[i * c.K * c.K], &other = row[first + i];
                            if (BACK)
                                one = other;
                            else
                                other = one;
                        }
                    }
                }
        });
}

template <class T> FK_APART void pack_backward(const Job& job, i64 g) {
    const Call& c = *job.call;
    reorder<T, false>(
        c, Shape(c), at<T>(c.weight, g * c.weight_stride), at<T>(job.weights, g * backward_size(c, Lanes<T>::W)));
}

// What has a gradient in one image: by output channel, for the weights; and by place, for the pixels.
template <class T> struct Lists {
    Entry<T>* by_output;  // (O, PH * PW)
    i64* outputs;  // (O,): how many
    Entry<T>* by_place;  // (PH * PW, 5, O); the fifth is of those without a gradient
    i64* places;  // (PH * PW, 4): how many

    Lists(const Call& c, const Shape& s, Arena* arena) {
        const i64 P = s.PH * s.PW;
        by_output = take<Entry<T>>(arena, c.O * P + 1);  // one more: what has no gradient is written and overwritten
        outputs = take<i64>(arena, c.O);
        by_place = c.grad_input ? take<Entry<T>>(arena, 5 * c.O * P) : nullptr;
        places = c.grad_input ? take<i64>(arena, 4 * P) : nullptr;
    }
};

// The backward pass of one image after another.
template <class T> struct Backward {
    static constexpr i64 L = Lanes<T>::W;
    const Call& c;
    const Shape& s;
    const Pieces& p;
    Lists<T>& lists;
    const i64* stride;  // of grad
    const T *x, *grad;  // the packed image, the gradient of the pooled values
    const uint8_t* places;

    FK_APART void list_by_output(T* bias) {
        const int32_t offsets[5] = {0, (int32_t)s.CB, (int32_t)(s.WP * s.CB), (int32_t)((s.WP + 1) * s.CB), 0};
        for (i64 o = 0; o < c.O; o++) {
            Entry<T>* list = lists.by_output + o * s.PH * s.PW;
            const uint8_t* place = places + o;
            i64 count = 0;
            T sum = 0;
            for (i64 py = 0; py < s.PH; py++) {
                const T* from = grad + o * stride[2] + py * stride[3];
                int32_t corner = (int32_t)(2 * py * s.WP * s.CB);
                for (i64 px = 0; px < s.PW; px++) {
                    const int k = *place;
                    const T value = *from;
                    list[count] = {value, corner + offsets[k]};
                    count += k < 4;
                    sum += if_live(value, k);
                    place += c.O, from += stride[4], corner += (int32_t)(2 * s.CB);
                }
            }
            lists.outputs[o] = count;
            bias[o] += sum;
        }
    }

    FK_APART void list_by_place() {
        for (i64 py = 0; py < s.PH; py++)
            for (i64 px = 0; px < s.PW; px++) {
                const i64 at = py * s.PW + px;
                const T* from = grad + py * stride[3] + px * stride[4];
                const uint8_t* place = places + at * c.O;
                Entry<T>* list = lists.by_place + at * 5 * c.O;
                i64 counts[5] = {};
                for (i64 o = 0; o < c.O; o++) {
                    const i64 k = place[o];
                    list[k * c.O + counts[k]++] = {from[o * stride[2]], (int32_t)o};
                }
                __builtin_memcpy(lists.places + 4 * at, counts, 4 * sizeof(i64));
            }
    }

    // Adds the gradients of the weights.
    FK_APART void weights(T* sums) {
        for (i64 b = 0; b < s.NB; b++)
            each_piece(p, [&](const Piece& piece) {
                const auto run = choose<Gather<T>>(piece.rows, piece.wide);
                const T* from = x + b * s.block() + piece.row * s.WP * s.CB + piece.vector * L;
                T* to = sums + (b * c.K * p.RV + piece.offset) * c.O * L;
                for (i64 o = 0; o < c.O; o++)
                    run(lists.by_output + o * s.PH * s.PW, lists.outputs[o], from, s.WP * s.CB,
                        to + o * piece.rows * piece.wide * L);
            });
    }

    // The same and the biases, without lists.
    FK_APART void weights_of_one_piece(T* sums, T* bias) {
        const auto run = choose<GatherAll<T>>(p.rows, p.wide);
        const i64 few = vectors(8192, s.PW * c.O * (i64)sizeof(T));  // rows of gradients that fit into the cache with x
        for (i64 py = 0; py < s.PH; py += few)
            for (i64 o = 0; o < c.O; o++) {
                Source<T> source{grad + o * stride[2] + py * stride[3], places + py * s.PW * c.O + o,
                                 least(few, s.PH - py), s.PW, stride[3], stride[4], c.O, s.CB, s.WP * s.CB};
                bias[o] += run(source, x + 2 * py * s.WP * s.CB, sums + o * p.rows * p.wide * L);
            }
    }

    // The gradients of the packed image.
    FK_APART void pixels(const T* weights, T* to) {
        const i64 row = s.WP * s.CB;
        __builtin_memset(to, 0, (size_t)s.packed_size() * sizeof(T));
        for (i64 b = 0; b < s.NB; b++)
            each_piece(p, [&](const Piece& piece) {
                const auto run = choose<Scatter<T>>(piece.rows, piece.wide);
                const T* from = weights + (b * c.K * p.RV + piece.offset) * c.O * L;
                T* first = to + b * s.block() + piece.row * row + piece.vector * L;
                for (i64 y = 0; y < 2 * s.PH; y++)
                    for (i64 q = 0; q < 2 * s.PW; q++) {
                        const i64 at = (y >> 1) * s.PW + (q >> 1), k = (y & 1) * 2 + (q & 1);
                        const i64 count = lists.places[4 * at + k];
                        if (!count) continue;
                        run(lists.by_place + (5 * at + k) * c.O, count, from, row, first + y * row + q * s.CB);
                    }
            });
    }
};

template <class T> FK_APART void unpack_image(const Call& c, const Shape& s, const T* packed, T* x) {
    const i64* stride = c.grad_input_strides;
    const i64 rows = least(c.H, s.HP - c.padding), columns = least(c.W, s.WP - c.padding);
    for (i64 b = 0; b < s.NB; b++) {
        const i64 first = b * s.CB, count = least(s.CB, c.C - first);
        for (i64 y = 0; y < c.H; y++) {
            const T* from = packed + b * s.block() + ((y + c.padding) * s.WP + c.padding) * s.CB;
            T* to = x + first * stride[2] + y * stride[3];
            for (i64 q = 0; q < c.W; q++, from += s.CB, to += stride[4]) {
                const bool inside = y < rows && q < columns;  // what no pooled place reads has no gradient
                for (i64 i = 0; i < count; i++) to[i * stride[2]] = inside ? from[i] : T(0);
            }
        }
    }
}

template <class T> void backward(const Job& job, i64 task, Arena* arena) {
    const Call& c = *job.call;
    const Shape s(c);
    const Pieces p = Pieces::of<T>(c, s);
    const i64 chunk = task / c.G, g = task % c.G, size = (c.B + job.chunks - 1) / job.chunks;
    const i64 *stride = c.grad_output_strides, *back = c.grad_input_strides;
    const i64 numbers = backward_size(c, Lanes<T>::W);
    T* sums = at<T>(job.grads, task * job.grads_size);
    T* bias = sums + numbers;
    __builtin_memset(sums, 0, (size_t)job.grads_size * sizeof(T));
    Lists<T> lists(c, s, arena);
    T* pixels = c.grad_input ? take<T>(arena, s.packed_size()) : nullptr;
    for (i64 image = chunk * size; image < least(c.B, (chunk + 1) * size); image++) {
        const T* x = at<T>(c.kept, (g * c.B + image) * s.kept_size(c));
        const T* grad = at<T>(c.grad_output, g * stride[0] + image * stride[1]);
        Backward<T> pass{c, s, p, lists, stride, x, grad, (const uint8_t*)(x + s.packed_size())};
        if (s.NB == 1 && p.one()) {
            pass.weights_of_one_piece(sums, bias);
        } else {
            pass.list_by_output(bias);
            pass.weights(sums);
        }
        if (!c.grad_input) continue;
        pass.list_by_place();
        pass.pixels(at<T>(job.weights, g * numbers), pixels);
        unpack_image<T>(c, s, pixels, at<T>(c.grad_input, g * back[0] + image * back[1]));
    }
}

// Adds up the chunks in order, and writes the gradients in the order of the weights.
template <class T> FK_APART void finish(const Job& job, i64 g) {
    constexpr i64 L = Lanes<T>::W;
    const Call& c = *job.call;
    T* sums = at<T>(job.grads, g * job.grads_size);
    for (i64 chunk = 1; chunk < job.chunks; chunk++) {
        const T* more = at<T>(job.grads, (chunk * c.G + g) * job.grads_size);
        for (i64 i = 0; i < job.grads_size; i++) sums[i] += more[i];
    }
    reorder<T, true>(c, Shape(c), at<T>(c.grad_weight, g * c.O * c.C * c.K * c.K), sums);
    __builtin_memcpy(at<T>(c.grad_bias, g * c.O), sums + backward_size(c, L), (size_t)c.O * sizeof(T));
}

template <class T> void run(const Job& job, int phase, i64 task, Arena* arena) {
    if (phase == PACK_FORWARD) pack_forward<T>(job, task);
    if (phase == FORWARD) forward<T>(job, task, arena);
    if (phase == PACK_BACKWARD) pack_backward<T>(job, task);
    if (phase == BACKWARD) backward<T>(job, task, arena);
    if (phase == FINISH) finish<T>(job, task);
}

}  // namespace

void FK_RUN(const void* data, int phase, i64 task, Arena* arena) {
    const Job& job = *(const Job*)data;
    job.call->is_double ? run<double>(job, phase, task, arena) : run<float>(job, phase, task, arena);
}

}  // namespace convolution
}  // namespace fk
