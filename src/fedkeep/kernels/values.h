// What a round does to every number of every upload: is it finite, add it to a sum, divide the sum.
//
// Sums are in double precision. FOLD adds w x to a sum, which begins with zeros, or with u h for an upload h that was
// held back until the second one came: so nothing is written that would be read again at once. FOLD_ROWS adds the rows
// of w x to rows of a sum. A task is a block of numbers, or of rows; nothing depends on the number of threads.

#pragma once

#include "runtime.h"

namespace fk {
namespace values {

// One call, as an array of 64-bit words shared with Python; keep native.VALUES in the same order.
struct Call {
    i64 phase, threads, level, is_double, N;  // is_double: of given, held and mean
    const void* given;  // (N,): FINITE and FOLD read them; (N, width): FOLD_ROWS
    const void* held;  // (N,), or null; FOLD
    double* sum;  // (N,): FOLD adds to them, MEAN reads them; (any, width): FOLD_ROWS
    i64 fresh;  // whether FOLD takes the sums as zeros; they need not be written before; FOLD_ROWS: from which row on
    double weight, held_weight;  // w, and u; MEAN divides by w
    void* mean;  // (N,): MEAN writes them
    const i64* places;  // (N,), all different: which row of the sum each row goes to; FOLD_ROWS
    i64 width;
};

// What the tasks of a call share.
struct Job {
    const Call* call;
    i64 bad;  // whether a number is NaN or infinite
};

enum Phase { FINITE, FOLD, MEAN, FOLD_ROWS };

constexpr i64 BLOCK = 1 << 15;  // numbers of a task

void run_avx512(const void*, int, i64, Arena*);
void run_avx2(const void*, int, i64, Arena*);
void run_portable(const void*, int, i64, Arena*);

}  // namespace values
}  // namespace fk
