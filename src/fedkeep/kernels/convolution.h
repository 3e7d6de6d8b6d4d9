// Convolution, ReLU and max-pool 2 as one layer, over one client or a cohort with different weights, forward and
// backward.
//
// Of the four places that a pooled value can come from, one has a gradient, and none if the ReLU is 0 there. The
// forward pass keeps which; the backward pass adds up over these places alone: a quarter of the work or less.
//
// A packed image is padded with zeros and cut to what the pooled places read. Its channels stand in blocks of CB,
// which lie together for each pixel: (NB, HP, WP, CB). A row of the kernel then meets K * CB numbers that lie
// together, and a block of an image fits into the first cache.
//
// A task of the forward pass is one image. A task of the backward pass is a chunk of images with a copy of the
// gradients of the weights; chunks depend on the number of images only, and copies are added in order: nothing
// depends on the number of threads.
//
// Names: G clients, B images, C channels, H and W height and width of an image, O output channels, K side of the
// kernel, PH and PW height and width after pooling, L lanes of a vector.

#pragma once

#include "runtime.h"

namespace fk {
namespace convolution {

// One call, as an array of 64-bit words shared with Python; keep native.CONVOLUTION in the same order. Strides count
// elements, from client to client, image, channel, row, column; 0 shares a value among all.
struct Call {
    i64 threads, level, is_double, G, B, C, H, W, O, K, padding;
    i64 bytes;  // whether the images are bytes, which stand for -1 ... 1
    const void* x;  // (G, B, C, H, W)
    i64 x_strides[5];
    const void *weight, *bias;  // (G, O, C, K, K), (G, O)
    i64 weight_stride, bias_stride;
    void* output;  // (G, B, O, PH, PW)
    i64 output_strides[5];
    void* kept;  // (G, B, kept_size): the packed image, then the places (PH, PW, O) as bytes: 0 to 3, or 4 where the
                 // ReLU is 0. For the backward pass; null where there will be none
    const void* grad_output;
    i64 grad_output_strides[5];
    void* grad_input;  // (G, B, C, H, W), may be null
    i64 grad_input_strides[5];
    void *grad_weight, *grad_bias;  // as weight and bias
};

struct Shape {
    i64 PH, PW, HP, WP, NB, CB;

    explicit Shape(const Call& c)
        : PH((c.H + 2 * c.padding - c.K + 1) / 2), PW((c.W + 2 * c.padding - c.K + 1) / 2), HP(2 * PH + c.K - 1),
          WP(2 * PW + c.K - 1), NB((c.C + 15) / 16), CB((c.C + NB - 1) / NB) {}

    i64 block() const { return HP * WP * CB; }
    i64 packed_size() const { return NB * block() + 64; }  // the last vectors may read past the end
    i64 kept_size(const Call& c) const { return packed_size() + PH * PW * c.O / (c.is_double ? 8 : 4) + 1; }
};

// A call and the memory that its tasks share.
struct Job {
    const Call* call;
    void *weights;  // in the order in which a pass reads them
    void *grads;  // (chunks, G, grads_size)
    i64 grads_size, chunks;
};

enum Phase { PACK_FORWARD, FORWARD, PACK_BACKWARD, BACKWARD, FINISH };

// Sizes by number of lanes; packed weights and their gradients have vectors of their own for each row of the kernel.
static inline i64 vectors(i64 n, i64 lanes) { return (n + lanes - 1) / lanes; }

static inline i64 forward_size(const Call& c, i64 lanes) {
    Shape s(c);
    return s.NB * c.K * c.K * s.CB * vectors(c.O, lanes) * lanes;
}

static inline i64 backward_size(const Call& c, i64 lanes) {
    Shape s(c);
    return s.NB * c.O * c.K * vectors(c.K * s.CB, lanes) * lanes;
}

static inline i64 chunks_of(i64 B) {
    i64 size = B > 128 ? (B + 15) / 16 : 8;
    return B > 0 ? (B + size - 1) / size : 1;
}

void run_avx512(const void*, int, i64, Arena*);
void run_avx2(const void*, int, i64, Arena*);
void run_portable(const void*, int, i64, Arena*);

}  // namespace convolution
}  // namespace fk
