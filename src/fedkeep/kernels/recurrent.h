// LSTM and GRU over one client or a cohort of clients with different weights, forward and backward.
//
// One task is one (client, direction, chunk of sequences); it runs all time steps. Sequences are sorted by length,
// longest first, so step t computes the first active[t] of them; their values lie in rows
// offset[t] .. offset[t] + active[t]. The reversed direction starts at each sequence's own end. Chunks depend on
// the number of sequences only, and their gradients are added in order: nothing depends on the number of threads.
//
// Names: G clients, D directions, B sequences, L longest length, I inputs, H hidden units, V rows of the table,
// W lanes of a vector, P "padded to a multiple of W".

#pragma once

#include "runtime.h"

namespace fk {
namespace recurrent {

// One call, as an array of 64-bit words shared with Python; keep native.RECURRENT in the same order.
struct Call {
    i64 gru, is_double, threads, level, pool;
    i64 G, D, B, L, I, H, V;
    const i64* lengths;  // (G, B)
    i64 lengths_stride;  // strides count elements from client to client; 0 shares a value among all
    const void* x;  // (G, B, L, I), or null where ids and table are given
    i64 x_stride;
    const i64* ids;  // (G, B, L)
    i64 ids_stride;
    const void* table;  // (G, V, I)
    i64 table_stride;
    const void* weights[8];  // per direction: w_ih, w_hh, b_ih, b_hh
    i64 weight_strides[8];
    void* output;  // (G, B, L, D*H), may be null
    void* pooled;  // (G, B, D*H): by `pool` the last states, or the mean or the greatest over time
    void* work;  // (G, D, B*L*5*HP): gates and (LSTM) cell or (GRU) hidden states, kept for the backward pass, and,
                 // for the greatest, B*HP steps where it stood; null where there will be no backward pass
    const void* grad_output;  // as output, may be null
    const void* grad_pooled;  // as pooled, may be null
    void* grad_input;  // (copies, ...as x or table), zeroed by the caller; may be null. One copy per direction and,
                       // of the table, per chunk; the sum comes out in the first
    void* grad_weights[8];  // (chunks, ...as the weights); the sum comes out in the first
};

enum Pool { LAST, MEAN, GREATEST };
enum Phase { FORWARD, BACKWARD, ADD_COPIES, PEAK };

constexpr i64 CHUNK = 64;  // sequences, as in native.py; small enough for the cache, large enough for the matrix products
inline i64 chunks_of(i64 B) { return B > CHUNK ? (B + CHUNK - 1) / CHUNK : 1; }

void run_avx512(const void*, int, i64, Arena*);
void run_avx2(const void*, int, i64, Arena*);
void run_portable(const void*, int, i64, Arena*);

}  // namespace recurrent
}  // namespace fk
