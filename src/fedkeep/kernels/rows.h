// Rows of a table under SGD with momentum μ, of which a step looks some up and moves them; the others wait.
//
// A row that waited for Δ steps has moved by −η v (μ + … + μ^Δ), and its velocity v has become μ^Δ v. LOOK_UP returns
// rows as they are now, and leaves the table as it is; MOVE takes the step v ← μv + g, w ← w − ηv from there and writes
// both back. A task is a block of rows, each of them once: nothing depends on the number of threads.

#pragma once

#include "runtime.h"

namespace fk {
namespace rows {

// One call, as an array of 64-bit words shared with Python; keep native.ROWS in the same order.
struct Call {
    i64 threads, level, is_double, N, D, step;  // N rows of D numbers; steps taken so far
    const i64* used;  // (N,): their places in the table, none twice
    void *table, *velocity;  // (V, D)
    i64* last;  // (V,): how many steps had been taken when a row was last moved
    const void *shrunk, *way;  // (step + 1 or more,), by Δ: μ^Δ, and η (μ + … + μ^Δ)
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
