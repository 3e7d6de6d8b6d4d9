// Rows of a table under SGD with momentum μ, of which a step looks some up and moves them; the others wait.
//
// A row w without a gradient of its own still moves by its velocity v, and towards an anchor r where there is one: its
// distance d = w − r and v change by the same 2 × 2 matrix at each step, so after Δ steps d is a d + b v, and v is
// c d + e v. LOOK_UP returns rows as they are now, and leaves the table as it is; MOVE takes the step v ← μv + g,
// w ← w − ηv from there and writes both back. A task is a block of rows, each of them once: nothing depends on the
// number of threads.

#pragma once

#include "runtime.h"

namespace fk {
namespace rows {

// One call, as an array of 64-bit words shared with Python; keep native.ROWS in the same order.
struct Call {
    i64 threads, level, is_double, N, D, step;  // N rows of D numbers; steps taken so far
    const i64* used;  // (N,): their places in the table, none twice
    void *table, *velocity;  // (V, D)
    const void* anchor;  // (V, D), or null: zeros
    void* products;  // (V, 3), null without an anchor: d·d, d·v and v·v of each row when it was last moved; MOVE writes
    i64* last;  // (V,): how many steps had been taken when a row was last moved
    const void* powers;  // (step + 1 or more, 4), by Δ: a, b, c, e
    const void* rates;  // (2,): η, μ
    void* rows;  // (N, D): LOOK_UP writes them, MOVE reads them
    const void* grads;  // (N, D), MOVE alone
};

enum Phase { LOOK_UP, MOVE };

constexpr i64 BLOCK = 256;  // rows of a task

void run_avx512(const void*, int, i64, Arena*);
void run_avx2(const void*, int, i64, Arena*);
void run_portable(const void*, int, i64, Arena*);

}  // namespace rows
}  // namespace fk
