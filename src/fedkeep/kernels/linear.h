// A linear layer with or without ReLU on few rows, over one client or a cohort with different weights.
//
// With few rows a layer is as fast as its weights are read: the forward pass reads them once, the backward pass once
// more for both gradients. A task of the forward pass is a block of outputs, of the backward pass a block of inputs,
// and every number is summed within one task: nothing depends on the number of threads.
//
// Names: G clients, B rows, I inputs, O outputs, L lanes of a vector.

#pragma once

#include "runtime.h"

namespace fk {
namespace linear {

// One call, as an array of 64-bit words shared with Python; keep native.LINEAR in the same order. Strides count
// elements from client to client; 0 shares a value among all.
struct Call {
    i64 threads, level, is_double, G, B, I, O, relu;
    const void* x;  // (G, B, I)
    i64 x_stride, row_stride;
    const void *weight, *bias;  // (G, O, I), (G, O)
    i64 weight_stride, bias_stride;
    void* output;  // (G, B, O)
    const void* grad_output;  // as output
    void* grad_input;  // as x but contiguous, may be null
    void *grad_weight, *grad_bias;
};

struct Job {
    const Call* call;
    void* grads;  // (G, O, B): of the outputs, 0 where the ReLU is 0
};

enum Phase { FORWARD, MASK, BACKWARD };

constexpr i64 OUTPUTS = 32, INPUTS = 256;  // of a task

static inline i64 blocks(i64 n, i64 size) { return (n + size - 1) / size; }

void run_avx512(const void*, int, i64, Arena*);
void run_avx2(const void*, int, i64, Arena*);
void run_portable(const void*, int, i64, Arena*);

}  // namespace linear
}  // namespace fk
