// The functions that Python calls, and the threads that tasks are spread over; compiled for any processor.

#include "convolution.h"
#include "linear.h"
#include "recurrent.h"
#include "rows.h"
#include "values.h"

#include <atomic>
#include <chrono>
#include <condition_variable>
#include <cstdlib>
#include <mutex>
#include <new>
#include <thread>
#include <vector>

#include <pthread.h>
#if defined(FK_X86)
#include <cpuid.h>
#endif

#define FK_EXPORT extern "C" __attribute__((visibility("default")))

namespace fk {

// Memory for a task's own arrays, kept by its thread from call to call.
struct Arena {
    struct Piece {
        char* memory;
        size_t size, used;
    };
    std::vector<Piece> pieces;

    static char* aligned(size_t bytes) {
        void* memory = nullptr;
        if (posix_memalign(&memory, 64, bytes)) throw std::bad_alloc();
        return (char*)memory;
    }

    void* take(size_t bytes) {
        bytes = (bytes + 127) / 64 * 64;  // one line apart, so arrays of 2^n bytes do not fall on one another in cache
        if (pieces.empty() || pieces.back().used + bytes > pieces.back().size) {
            size_t size = bytes > (size_t(1) << 20) ? bytes : (size_t(1) << 20);
            pieces.push_back({aligned(size), size, 0});
        }
        Piece& piece = pieces.back();
        void* memory = piece.memory + piece.used;
        piece.used += bytes;
        return memory;
    }

    void reset() {  // one piece from now on, unless that would keep much memory for ever
        size_t size = 0;
        for (Piece& piece : pieces) size += piece.size;
        if (pieces.size() > 1 || size > (size_t(256) << 20)) {
            clear();
            if (size <= (size_t(256) << 20)) pieces.push_back({aligned(size), size, 0});
        }
        if (!pieces.empty()) pieces.back().used = 0;
    }

    void clear() {
        for (Piece& piece : pieces) free(piece.memory);
        pieces.clear();
    }

    ~Arena() { clear(); }
};

void* arena_take(Arena* arena, size_t bytes) { return arena->take(bytes); }

namespace {

struct Work {
    const void* call;
    Runner run;
    int phase;
    i64 tasks;
    std::atomic<i64> next{0};
    std::atomic<bool> failed{false};

    void help() {
        thread_local Arena arena;
        for (i64 task = next++; task < tasks; task = next++) {
            try {
                run(call, phase, task, &arena);
                arena.reset();
            } catch (const std::bad_alloc&) {
                failed = true;
                arena.clear();
            }
        }
    }
};

// Threads that sleep between calls, where PyTorch's are not known. A forked child has none of them and starts its own.
class Pool {
public:
    void run(Work& work, i64 threads) {
        std::unique_lock<std::mutex> one(calls_, std::try_to_lock);  // a second caller at the same time works alone
        i64 helpers = (threads < work.tasks ? threads : work.tasks) - 1;
        if (!one.owns_lock() || helpers < 1) return work.help();
        {
            std::lock_guard<std::mutex> lock(mutex_);
            while ((i64)count_ < helpers) {
                std::thread([this, id = count_] { serve(id); }).detach();
                count_++;
            }
            work_ = &work;
            wanted_ = helpers;
            busy_ = helpers;
            call_++;
        }
        wake_.notify_all();
        work.help();
        std::unique_lock<std::mutex> lock(mutex_);
        done_.wait(lock, [this] { return busy_ == 0; });
        work_ = nullptr;
    }

private:
    void serve(i64 id) {
        i64 seen = 0;
        std::unique_lock<std::mutex> lock(mutex_);
        for (;;) {
            wake_.wait(lock, [&] { return call_ != seen && work_ && id < wanted_; });
            seen = call_;
            Work* work = work_;
            lock.unlock();
            work->help();
            lock.lock();
            if (--busy_ == 0) done_.notify_one();
        }
    }

    std::mutex calls_, mutex_;
    std::condition_variable wake_, done_;
    Work* work_ = nullptr;
    i64 wanted_ = 0, busy_ = 0, call_ = 0, count_ = 0;
};

// OpenMP's way to run a function on all threads of a team, the caller's among them.
typedef void (*Parallel)(void (*)(void*), void*, unsigned, unsigned);

Parallel team = nullptr;  // that of PyTorch: its threads busily wait for more work, and threads of ours would wait for them
Pool* pool = nullptr;  // never destroyed: its threads may outlive main
std::once_flag once;

void prepare() {
    std::call_once(once, [] {
        pool = new Pool;
        pthread_atfork(nullptr, nullptr, [] { pool = new Pool, team = nullptr; });  // a child has lost all threads but one
    });
}

void spread(Work& work, i64 threads) {
    prepare();
    if (team && threads > 1 && work.tasks > 1)  // all threads: a smaller team would end those that are left over
        team([](void* all) { static_cast<Work*>(all)->help(); }, &work, (unsigned)threads, 0);
    else
        pool->run(work, threads);
}

#if defined(FK_X86)
// Asked of the processor itself: in a library linked by Zig, __builtin_cpu_supports says no to everything.
i64 level_of_processor() {
    unsigned a, b, c, d, ext;
    if (!__get_cpuid(1, &a, &b, &c, &d) || !__get_cpuid_count(7, 0, &a, &ext, &b, &d)) return 0;
    const unsigned FMA = 1u << 12, OSXSAVE = 1u << 27;
    const unsigned AVX2 = 1u << 5, AVX512 = 1u << 16 | 1u << 17 | 1u << 30 | 1u << 31;  // F, DQ, BW, VL
    if (!(c & FMA) || !(c & OSXSAVE) || !(ext & AVX2)) return 0;
    unsigned low, high;  // which registers the system saves
    __asm__("xgetbv" : "=a"(low), "=d"(high) : "c"(0));
    if ((low & 0x6) != 0x6) return 0;
    return (ext & AVX512) == AVX512 && (low & 0xe0) == 0xe0 ? 2 : 1;
}
#endif

i64 best_level() {
#if defined(FK_X86)
    static const i64 best = level_of_processor();
    return best;
#else
    return 0;
#endif
}

// The widest of a kernel's three that the processor has and the caller allows.
Runner runner(i64 level, Runner avx512, Runner avx2, Runner portable) {
    const i64 best = best_level();
    if (level > best) level = best;
    return level == 2 ? avx512 : level == 1 ? avx2 : portable;
}

#if defined(FK_X86)
#define FK_RUNNER(level, kernel) runner(level, kernel::run_avx512, kernel::run_avx2, kernel::run_portable)
#else
#define FK_RUNNER(level, kernel) runner(level, nullptr, nullptr, kernel::run_portable)
#endif

i64 run(const void* call, Runner run, int phase, i64 tasks, i64 threads) {
    Work work;
    work.call = call;
    work.run = run;
    work.phase = phase;
    work.tasks = tasks;
    spread(work, threads);
    return work.failed ? 3 : 0;
}

i64 check(const recurrent::Call& c) {
    for (i64 g = 0; g < (c.lengths_stride ? c.G : 1); g++)
        for (i64 b = 0; b < c.B; b++) {
            i64 n = c.lengths[g * c.lengths_stride + b];
            if (n < 1 || n > c.L) return 1;
        }
    if (!c.ids) return 0;
    for (i64 g = 0; g < c.G; g++)
        for (i64 b = 0; b < c.B; b++)
            for (i64 t = 0; t < c.lengths[g * c.lengths_stride + b]; t++) {
                i64 id = c.ids[g * c.ids_stride + b * c.L + t];
                if (id < 0 || id >= c.V) return 2;
            }
    return 0;
}

i64 run_recurrent(const recurrent::Call& c, int phase, i64 tasks) {
    return run(&c, FK_RUNNER(c.level, recurrent), phase, tasks, c.threads);
}

// One pass of the convolution: memory that its tasks share, then its phases.
i64 run_convolution(const convolution::Call& c, bool back) {
    using namespace convolution;
    static thread_local Arena arena;
    const i64 level = c.level < best_level() ? c.level : best_level(), bytes = c.is_double ? 8 : 4;
    const i64 lanes = (level == 2 ? 64 : level == 1 ? 32 : 16) / bytes;
    const Runner kernel = FK_RUNNER(level, convolution);
    Job job = {&c, nullptr, nullptr, 0, chunks_of(c.B)};
    try {
        arena.reset();
        if (!back || c.grad_input)
            job.weights = arena.take((size_t)(c.G * bytes * (back ? backward_size(c, lanes) : forward_size(c, lanes))));
        if (back) {
            job.grads_size = backward_size(c, lanes) + (c.O + 15) / 16 * 16;
            job.grads = arena.take((size_t)(job.chunks * c.G * bytes * job.grads_size));
        }
    } catch (const std::bad_alloc&) {
        arena.clear();
        return 3;
    }
    i64 wrong = 0;
    if (!back) {
        wrong = run(&job, kernel, PACK_FORWARD, c.G, c.threads);
        return wrong ? wrong : run(&job, kernel, FORWARD, c.G * c.B, c.threads);
    }
    if (job.weights) wrong = run(&job, kernel, PACK_BACKWARD, c.G, c.threads);
    if (!wrong) wrong = run(&job, kernel, BACKWARD, c.G * job.chunks, c.threads);
    return wrong ? wrong : run(&job, kernel, FINISH, c.G, c.threads);
}

i64 run_linear(const linear::Call& c, bool back) {
    using namespace linear;
    static thread_local Arena arena;
    const Runner kernel = FK_RUNNER(c.level, linear);
    Job job = {&c, nullptr};
    if (!back) return run(&job, kernel, FORWARD, c.G * blocks(c.O, OUTPUTS), c.threads);
    try {
        arena.reset();
        job.grads = arena.take((size_t)(c.G * c.B * c.O * (c.is_double ? 8 : 4)));
    } catch (const std::bad_alloc&) {
        arena.clear();
        return 3;
    }
    const i64 wrong = run(&job, kernel, MASK, c.G, c.threads);
    return wrong ? wrong : run(&job, kernel, BACKWARD, c.G * blocks(c.I, INPUTS), c.threads);
}

i64 run_rows(const rows::Call& c, int phase) {
    return run(&c, FK_RUNNER(c.level, rows), phase, (c.N + rows::BLOCK - 1) / rows::BLOCK, c.threads);
}

// 1: a number is not finite.
i64 run_values(const values::Call& c) {
    values::Job job = {&c, 0};
    run(&job, FK_RUNNER(c.level, values), (int)c.phase, (c.N + values::BLOCK - 1) / values::BLOCK, c.threads);
    return job.bad;
}

template <class Call> constexpr i64 words() { return (i64)sizeof(Call) / 8; }

}  // namespace
}  // namespace fk

// The version, and how many words the calls have: both sides must mean the same.
FK_EXPORT int64_t fk_abi() {
    const int64_t calls[] = {
        fk::words<fk::recurrent::Call>(), fk::words<fk::convolution::Call>(), fk::words<fk::linear::Call>(),
        fk::words<fk::rows::Call>(), fk::words<fk::values::Call>()};
    int64_t all = FK_ABI;
    for (int64_t words : calls) all = all * 1000 + words;
    return all;
}

// 2: AVX-512, 1: AVX2 with FMA, 0: neither.
FK_EXPORT int64_t fk_level() { return fk::best_level(); }

// Lets tasks run on the threads of PyTorch's OpenMP: the address of its GOMP_parallel; null: on threads of their own.
FK_EXPORT void fk_team(void* parallel) {
    fk::prepare();
    fk::team = (fk::Parallel)parallel;
}

// Floating-point operations per second of one thread in multiply-adds alone, by the widest vectors.
FK_EXPORT double fk_peak(int64_t level) {
    fk::recurrent::Call call = {};
    call.level = level;
    auto begin = std::chrono::steady_clock::now();
    fk::run_recurrent(call, fk::recurrent::PEAK, 1);
    std::chrono::duration<double> seconds = std::chrono::steady_clock::now() - begin;
    fk::i64 lanes = level == 2 ? 16 : level == 1 ? 8 : 4;
    return 2.0 * 12 * (1 << 20) * (double)lanes / seconds.count();
}

// 0: done; 1: a length is below 1 or above L; 2: an id is below 0 or not below V; 3: out of memory.
FK_EXPORT int64_t fk_recurrent(const fk::recurrent::Call* call) {
    using namespace fk::recurrent;
    int64_t wrong = fk::check(*call);
    return wrong ? wrong : fk::run_recurrent(*call, FORWARD, call->G * call->D * chunks_of(call->B));
}

FK_EXPORT int64_t fk_recurrent_backward(const fk::recurrent::Call* call) {
    using namespace fk::recurrent;
    int64_t wrong = fk::check(*call), chunks = chunks_of(call->B);
    if (!wrong) wrong = fk::run_recurrent(*call, BACKWARD, call->G * call->D * chunks);
    if (!wrong && (chunks > 1 || (call->D == 2 && call->grad_input)))
        wrong = fk::run_recurrent(*call, ADD_COPIES, call->G);
    return wrong;
}

// 0: done; 3: out of memory.
FK_EXPORT int64_t fk_convolution(const fk::convolution::Call* call) { return fk::run_convolution(*call, false); }

FK_EXPORT int64_t fk_convolution_backward(const fk::convolution::Call* call) {
    return fk::run_convolution(*call, true);
}

// 0: done; 3: out of memory.
FK_EXPORT int64_t fk_linear(const fk::linear::Call* call) { return fk::run_linear(*call, false); }

FK_EXPORT int64_t fk_linear_backward(const fk::linear::Call* call) { return fk::run_linear(*call, true); }

// 0, always.
FK_EXPORT int64_t fk_rows(const fk::rows::Call* call) { return fk::run_rows(*call, fk::rows::LOOK_UP); }

FK_EXPORT int64_t fk_rows_backward(const fk::rows::Call* call) { return fk::run_rows(*call, fk::rows::MOVE); }

// 0: done; 1: a number is NaN or infinite.
FK_EXPORT int64_t fk_values(const fk::values::Call* call) { return fk::run_values(*call); }
