// What every part of the library knows: tasks, their memory, and the instruction sets.
//
// Kernels are compiled once per instruction set (FK_LEVEL_AVX512, FK_LEVEL_AVX2, FK_LEVEL_PORTABLE); entry.cpp is
// compiled once, spreads tasks over threads and picks the best set that the processor has. A kernel uses nothing
// inline from the standard library: a linker keeps one copy of an inline function, and it must not be the one that
// needs AVX-512.

#pragma once

#include <cstddef>
#include <cstdint>
#include <cstring>

#define FK_ABI 5  // as in native.py

namespace fk {

typedef int64_t i64;

struct Arena;
void* arena_take(Arena* arena, size_t bytes);

typedef void (*Runner)(const void* call, int phase, i64 task, Arena*);

}  // namespace fk
