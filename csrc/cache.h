// A cache of keys or values, read once and in order: the columns are the lanes. The two products of decoding, each of
// which fetches ahead what the other one reads next.
#pragma once
#include <utility>

#include "room.h"

namespace {
constexpr int64_t LINE = 64;  // bytes that are fetched together

// Rows stand 1, 2 or 4 apart in a tile [key][place]: a vector of it holds whole keys.
constexpr int places(int64_t rows) { return rows == 3 ? 4 : int(rows); }
// Keys and vectors of a value that share the registers of a product; keys of a batch: whole vectors of a tile.
constexpr int keys_at_once(int64_t rows) { return rows == 1 ? 8 : rows == 2 ? 6 : rows == 3 ? 4 : 3; }
constexpr int vectors_at_once(int64_t rows) { return rows > 2 ? 2 : 4; }
constexpr int64_t batch_of(int64_t rows) { return rows == 1 ? 16 : 48 / places(rows); }
constexpr int64_t bytes_of(int64_t kind) { return kind == FLOAT32 ? 4 : 2; }
constexpr int64_t up(int64_t n, int64_t step) { return (n + step - 1) / step; }
// The last steps end with the row: what they read again counts once, by zeros in the query.
inline int64_t column_of(int64_t step, int64_t width) { return least(step * LANES, width - LANES); }

// Rows of a batch, one behind the other; beyond the last there is the last again.
struct Cached {
    const char *data;
    int64_t stride, last;  // in bytes, in rows
    const char *row(int64_t n) const { return data + least(n, last) * stride; }
};

// What is fetched while something else is worked on: the lines of the rows of a batch, in their order, some a step.
struct Coming {
    const char *data;
    const int64_t *order;
    template <int64_t LINES>
    void fetch(int64_t step) const {
        REGARD_UNROLL
        for (int64_t n = 0; n < LINES; ++n) __builtin_prefetch(data + order[step * LINES + n]);
    }
};

inline void put_in_order(int64_t rows, int64_t stride, int64_t bytes, int64_t fetches, int64_t *order) {
    for (int64_t n = 0, row = 0, at = 0, due = 0; n < fetches; ++n) {
        order[n] = row * stride + at;
        for (due += rows * up(bytes, LINE); due >= fetches; due -= fetches)
            if ((at += LINE) >= bytes) at = 0, ++row;
    }
}

typedef uint16_t Halves __attribute__((vector_size(2 * LANES), aligned(2), may_alias));

template <int KIND>
REGARD_INLINE F read(const char *from) {
    if constexpr (KIND == FLOAT32) return load(reinterpret_cast<const float *>(from));
#if defined(__AVX2__) && REGARD_LANES == 8
    const __m128i x = _mm_loadu_si128(reinterpret_cast<const __m128i *>(from));
    if constexpr (KIND == FLOAT16) return reinterpret_cast<F>(_mm256_cvtph_ps(x));
    return reinterpret_cast<F>(_mm256_slli_epi32(_mm256_cvtepu16_epi32(x), 16));
#else
    const Halves x = *reinterpret_cast<const Halves *>(from);
    if constexpr (KIND == BFLOAT16) return reinterpret_cast<F>(__builtin_convertvector(x, U) << 16);
#if defined(__AVX512F__)
    return reinterpret_cast<F>(_mm512_cvtph_ps(reinterpret_cast<__m256i>(x)));
#else
    F found;
    for (int n = 0; n < LANES; ++n) found[n] = from_half(x[n]);
    return found;
#endif
#endif
}

typedef float Four __attribute__((vector_size(16), aligned(4), may_alias));

template <class V>
REGARD_INLINE Four narrowed(V x) {
    if constexpr (sizeof(V) == 16) return Four(x);
    else if constexpr (sizeof(V) == 32)
        return __builtin_shufflevector(x, x, 0, 1, 2, 3) + __builtin_shufflevector(x, x, 4, 5, 6, 7);
    else
        return narrowed(__builtin_shufflevector(x, x, 0, 1, 2, 3, 4, 5, 6, 7) +
                        __builtin_shufflevector(x, x, 8, 9, 10, 11, 12, 13, 14, 15));
}

// Of every four lanes: a0 + a2, a1 + a3, b0 + b2, b1 + b3; then a0 + a1, a2 + a3, b0 + b1, b2 + b3.
template <int... N>
REGARD_INLINE F halved(F a, F b, std::integer_sequence<int, N...>) {
    return __builtin_shufflevector(a, b, (N % 4 < 2 ? N : N + LANES)...) +
           __builtin_shufflevector(a, b, (N % 4 < 2 ? N + 2 : N - 2 + LANES)...);
}
template <int... N>
REGARD_INLINE F paired(F a, F b, std::integer_sequence<int, N...>) {
    return __builtin_shufflevector(a, b, (N / 4 * 4 + N % 2 * 2 + (N % 4 < 2 ? 0 : LANES))...) +
           __builtin_shufflevector(a, b, (N / 4 * 4 + N % 2 * 2 + 1 + (N % 4 < 2 ? 0 : LANES))...);
}
REGARD_INLINE Four sums_of(const F *x) {
    const std::make_integer_sequence<int, LANES> order;
    return narrowed(paired(halved(x[0], x[1], order), halved(x[2], x[3], order), order));
}

// tile[key][place] = query . key for `count` keys, a whole number of KEYS; meanwhile `next` is fetched.
template <int KIND, int ROWS>
__attribute__((noinline)) void score_keys(const Cached &keys, int64_t count, int64_t width, const float *query,
                                          float *tile, const Coming &next) {
    constexpr int KEYS = keys_at_once(ROWS), WIDE = places(ROWS);
    constexpr int64_t LINES = up(KEYS * LANES * bytes_of(KIND), LINE);
    const int64_t steps = up(width, LANES), apart = steps * LANES;
    int64_t fetched = 0;
    for (int64_t first = 0; first < count; first += KEYS) {
        const char *row[KEYS];
        F x[KEYS * WIDE] = {};
        EACH(k, KEYS) row[k] = keys.row(first + k);
        for (int64_t n = 0; n < steps; ++n) {
            next.fetch<LINES>(fetched++);
            const int64_t at = column_of(n, width) * bytes_of(KIND);
            F key[KEYS];
            EACH(k, KEYS) key[k] = read<KIND>(row[k] + at);
            EACH(m, ROWS) {
                const F q = load(query + m * apart + n * LANES);
                EACH(k, KEYS) x[k * WIDE + m] += q * key[k];
            }
        }
        REGARD_UNROLL
        for (int n = 0; n < KEYS * WIDE; n += 4) *reinterpret_cast<Four *>(tile + first * WIDE + n) = sums_of(x + n);
    }
}

// out[row] += weight * value over `count` keys, some columns after the other; meanwhile `next` is fetched.
template <int KIND, int ROWS>
__attribute__((noinline)) void mix_values(const Cached &values, int64_t count, int64_t width, const float *weights,
                                          float *out, const Coming &next) {
    constexpr int COLUMNS = vectors_at_once(ROWS), WIDE = places(ROWS);
    constexpr int64_t LINES = up(COLUMNS * LANES * bytes_of(KIND), LINE);
    const int64_t strips = up(width, COLUMNS * LANES), apart = strips * COLUMNS * LANES;
    int64_t fetched = 0;
    for (int64_t strip = 0; strip < strips; ++strip) {
        int64_t at[COLUMNS];
        F x[COLUMNS][ROWS];
        float *to = out + strip * COLUMNS * LANES;
        EACH(c, COLUMNS) {
            at[c] = column_of(strip * COLUMNS + c, width) * bytes_of(KIND);
            EACH(m, ROWS) x[c][m] = load(to + m * apart + c * LANES);
        }
        const char *row = values.data;
        for (int64_t k = 0; k < count; ++k, row += values.stride) {
            next.fetch<LINES>(fetched++);
            F value[COLUMNS];
            EACH(c, COLUMNS) value[c] = read<KIND>(row + at[c]);
            EACH(m, ROWS) {
                const F weight = all(weights[k * WIDE + m]);
                EACH(c, COLUMNS) x[c][m] += weight * value[c];
            }
        }
        EACH(c, COLUMNS) EACH(m, ROWS) store(to + m * apart + c * LANES, x[c][m]);
    }
}
}  // namespace
