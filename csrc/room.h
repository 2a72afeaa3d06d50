// A thread's room, and the ways of rows into it and out of it: widened, transposed, narrowed.
#pragma once
#include "arguments.h"
#include "mm.h"
#include "regard.h"

namespace {
// Memory of a thread, kept between calls and given back with the thread.
class Arena {
  public:
    ~Arena() { std::free(memory); }
    bool start(int64_t floats) {
        used = 0;
        if (floats <= size) return true;
        std::free(memory);
        size = (floats + 1023) / 1024 * 1024;
        memory = static_cast<float *>(std::aligned_alloc(64, size * sizeof(float)));
        if (!memory) size = 0;
        return memory != nullptr;
    }
    // A thread keeps room for tiles, not for strips as long as the keys.
    void end() {
        if (size < MOST_KEPT) return;
        std::free(memory);
        memory = nullptr, size = 0;
    }
    float *take(int64_t floats) {
        float *found = memory ? memory + used : nullptr;
        used += padded(floats);
        return found;
    }
    int64_t taken() const { return used; }
    static int64_t padded(int64_t floats) { return (floats + 15) / 16 * 16; }

  private:
    static constexpr int64_t MOST_KEPT = 1 << 20;
    float *memory = nullptr;
    int64_t size = 0, used = 0;
};

inline Arena &arena() {
    static thread_local Arena own;
    return own;
}

// What a room takes of an arena: it is made once of an empty one.
template <class Room, class... Given>
int64_t floats_of(const Given &...given) {
    Arena counted;
    (void)Room(given..., counted);
    return counted.taken();
}

// Runs run(n), which returns a status, for n of [0, work) on so many threads; one thread opens no team, of which a
// forked child has none. A thread has room for `floats` each time. Returns a status that is not OK, if any.
template <class Run>
int32_t on_threads(int64_t threads, int64_t work, int64_t floats, Run run) {
    int32_t found = REGARD_OK;
    const auto one = [&](int64_t n) {
        const int32_t status = arena().start(floats) ? run(n) : REGARD_NO_MEMORY;
        if (status != REGARD_OK) __atomic_store_n(&found, status, __ATOMIC_RELAXED);
    };
    if (threads <= 1 || work <= 1) {
        for (int64_t n = 0; n < work; ++n) one(n);
        arena().end();
        return found;
    }
#pragma omp parallel num_threads(int(least(threads, work)))
    {
#pragma omp for schedule(dynamic, 1)
        for (int64_t n = 0; n < work; ++n) one(n);
        arena().end();
    }
    return found;
}

inline int64_t padded_width(int64_t width) { return (width + GROUP - 1) / GROUP * GROUP; }

inline float from_half(uint16_t x) {
#if defined(__F16C__)
    return _cvtsh_ss(x);
#else
    return float(__builtin_bit_cast(__fp16, x));
#endif
}
inline uint16_t to_half(float x) {
#if defined(__F16C__)
    return uint16_t(_cvtss_sh(x, 0));
#else
    return __builtin_bit_cast(uint16_t, __fp16(x));
#endif
}
REGARD_INLINE float from_brain(uint16_t x) { return __builtin_bit_cast(float, uint32_t(x) << 16); }
REGARD_INLINE uint16_t to_brain(float x) {  // to the nearest, ties to even
    const uint32_t bits = __builtin_bit_cast(uint32_t, x);
    return uint16_t((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16);
}

inline void widen(const void *from, int64_t kind, int64_t at, int64_t count, float *to) {
    if (kind == FLOAT32) return void(std::memcpy(to, static_cast<const float *>(from) + at, count * sizeof(float)));
    const uint16_t *x = static_cast<const uint16_t *>(from) + at;
    for (int64_t n = 0; n < count; ++n) to[n] = kind == BFLOAT16 ? from_brain(x[n]) : from_half(x[n]);
}

inline void narrow(const float *from, int64_t count, void *to, int64_t kind, int64_t at) {
    if (kind == FLOAT32) return void(std::memcpy(static_cast<float *>(to) + at, from, count * sizeof(float)));
    uint16_t *x = static_cast<uint16_t *>(to) + at;
    for (int64_t n = 0; n < count; ++n) x[n] = kind == BFLOAT16 ? to_brain(from[n]) : to_half(from[n]);
}

struct Floats {
    const float *data;
    int64_t stride;
    const float *row(int64_t n) const { return data + n * stride; }
};

// Rows [first, first + count) as floats: in place where they are floats that the caches take well, else in `room`.
inline Floats rows_of(const Rows4 &x, int64_t kind, int64_t b, int64_t h, int64_t first, int64_t count, int64_t width,
                      float *room) {
    const int64_t at = x.place(b, h, first);
    if (kind == FLOAT32 && x.t < 512) return {static_cast<const float *>(x.data) + at, x.t};
    for (int64_t n = 0; n < count; ++n) widen(x.data, kind, at + n * x.t, width, room + n * width);
    return {room, width};
}

// The same with a stride of whole groups, zeros behind the width: a right-hand side of products.
inline void padded_rows(const Rows4 &x, int64_t kind, int64_t b, int64_t h, int64_t first, int64_t rows, int64_t width,
                        float *room) {
    const int64_t wide = padded_width(width), at = x.place(b, h, first);
    if (wide > width) std::memset(room, 0, rows * wide * sizeof(float));
    for (int64_t n = 0; n < rows; ++n) widen(x.data, kind, at + n * x.t, width, room + n * wide);
}

// Rows as lanes: out[group][column][lane] = factor * rows[lane][column], zeros for lanes without a row.
// Returns whether all of it is finite.
inline bool rows_to_lanes(Floats in, int64_t rows, int64_t width, float factor, float *out) {
    F odd = {};
    const int groups = int((rows + GROUP - 1) / GROUP);
    for (int g = 0; g < groups; ++g)
        EACH(n, VECTORS) {
            float *lanes = out + g * width * GROUP + n * LANES;
            const int64_t top = g * GROUP + n * LANES, there = most(0, least(LANES, rows - top));
            int64_t c = 0;
            for (; c + LANES <= width; c += LANES) {
                F x[LANES];
                EACH(lane, LANES) x[lane] = lane < there ? load(in.row(top + lane) + c) : F{};
                transpose(x);
                EACH(lane, LANES) {
                    odd += x[lane] * 0.0f;
                    store(lanes + (c + lane) * GROUP, x[lane] * factor);
                }
            }
            for (; c < width; ++c)
                for (int lane = 0; lane < LANES; ++lane) {
                    const float x = lane < there ? in.row(top + lane)[c] : 0.0f;
                    odd[0] += x * 0.0f;
                    lanes[c * GROUP + lane] = x * factor;
                }
        }
    return sum(odd) == 0.0f;
}

// Lanes as rows, each lane times its factor: rows of `width` numbers, `stride` apart. Returns whether all is finite.
inline bool lanes_to_rows(const float *in, const float *factors, int64_t rows, int64_t width, void *out, int64_t kind,
                          int64_t at, int64_t stride, float *room) {
    F odd = {};
    EACH(n, VECTORS) {
        const int64_t there = most(0, least(LANES, rows - n * LANES));
        if (!there) break;
        const F factor = load(factors + n * LANES);
        float *direct = kind == FLOAT32 ? static_cast<float *>(out) + at + n * LANES * stride : room;
        const int64_t apart = kind == FLOAT32 ? stride : width;
        int64_t c = 0;
        for (; c + LANES <= width; c += LANES) {
            F x[LANES];
            EACH(lane, LANES) {
                x[lane] = load(in + (c + lane) * GROUP + n * LANES) * factor;
                odd += x[lane] * 0.0f;
            }
            transpose(x);
            EACH(lane, LANES)
                if (lane < there) store(direct + lane * apart + c, x[lane]);
        }
        for (; c < width; ++c)
            for (int64_t lane = 0; lane < there; ++lane) {
                const float x = in[c * GROUP + n * LANES + lane] * factor[lane];
                odd[0] += x * 0.0f;
                direct[lane * apart + c] = x;
            }
        if (kind != FLOAT32)
            for (int64_t lane = 0; lane < there; ++lane)
                narrow(room + lane * width, width, out, kind, at + (n * LANES + lane) * stride);
    }
    return sum(odd) == 0.0f;
}

// Whether a row range is finite throughout.
inline bool finite_rows(const Rows4 &x, int64_t kind, int64_t b, int64_t h, int64_t first, int64_t count,
                        int64_t width) {
    F odd[4] = {};
    float rest = 0;
    alignas(64) float wide[256];
    for (int64_t n = first; n < first + count; ++n) {
        const int64_t at = x.place(b, h, n);
        const float *row = static_cast<const float *>(x.data) + at;
        if (kind != FLOAT32) widen(x.data, kind, at, width, wide), row = wide;
        int64_t c = 0;
        for (; c + 4 * LANES <= width; c += 4 * LANES)
            for (int m = 0; m < 4; ++m) odd[m] += load(row + c + m * LANES) * 0.0f;
        for (; c < width; ++c) rest += row[c] * 0.0f;
    }
    return sum(odd[0] + odd[1] + odd[2] + odd[3]) + rest == 0.0f;
}
}  // namespace
