// Which keys a block of queries may see: bounds lane by lane, summaries group by group, bits where a tensor decides.
#pragma once
#include <utility>

#include "arguments.h"
#include "mm.h"

namespace {
struct Span {
    int64_t first, last;  // keys [first, last)
    bool ragged;          // some lane does not see all of them by its runs
};

struct Seen {
    alignas(64) int32_t low[2][BLOCK], high[2][BLOCK];
    int64_t from[2][GROUPS], to[2][GROUPS], inner_from[2][GROUPS], inner_to[2][GROUPS];
    int64_t ranges[2][2];  // of the whole block, in order, apart from one another
    int count, runs;

    void find(const Arguments &a, int64_t b, int64_t h, int64_t first, int64_t rows) {
        runs = a.runs ? int(a.runs) : 1;
        const int64_t offset = a.offsets ? a.offsets[b] : a.offset;
        for (int r = 0; r < runs; ++r) {
            for (int64_t lane = 0; lane < BLOCK; ++lane) {
                const int64_t i = first + least(lane, rows - 1), p = i + offset;
                int64_t low_key = 0, high_key = a.Tk;
                if (a.runs) {
                    if (a.left[r] != UNLIMITED) low_key = most(low_key, p - a.left[r]);
                    if (a.right[r] != UNLIMITED) high_key = least(high_key, p + a.right[r] + 1);
                    low_key = most(low_key, a.start[r].at(b, h, i, 0));
                    high_key = least(high_key, a.stop[r].at(b, h, i, a.Tk));
                }
                low_key = least(low_key, a.Tk);
                low[r][lane] = int32_t(low_key), high[r][lane] = int32_t(most(high_key, low_key));
            }
            for (int g = 0; g < GROUPS; ++g) summarise(r, g, a.Tk);
        }
        whole();
    }

    // Calls f(first, last) for the keys of the ranges, at most `step` at a time.
    template <class Tile>
    void each_tile(int64_t step, Tile f) const {
        for (int range = 0; range < count; ++range)
            for (int64_t k = ranges[range][0], end = ranges[range][1]; k < end; k += step) f(k, least(k + step, end));
    }

    Span span(int g, int64_t first, int64_t last) const {
        Span found{last, first, true};
        for (int r = 0; r < runs; ++r) {
            const int64_t x = most(first, from[r][g]), y = least(last, to[r][g]);
            if (x >= y) continue;
            found.first = least(found.first, x), found.last = most(found.last, y);
        }
        for (int r = 0; r < runs; ++r)
            if (inner_from[r][g] <= found.first && inner_to[r][g] >= found.last) found.ragged = false;
        return found;
    }

  private:
    void summarise(int r, int g, int64_t Tk) {
        from[r][g] = Tk, to[r][g] = 0, inner_from[r][g] = 0, inner_to[r][g] = Tk;
        for (int lane = g * GROUP; lane < (g + 1) * GROUP; ++lane) {
            inner_from[r][g] = most(inner_from[r][g], low[r][lane]);
            inner_to[r][g] = least(inner_to[r][g], high[r][lane]);
            if (low[r][lane] >= high[r][lane]) continue;
            from[r][g] = least(from[r][g], low[r][lane]), to[r][g] = most(to[r][g], high[r][lane]);
        }
    }

    void whole() {
        count = 0;
        for (int r = 0; r < runs; ++r) {
            int64_t first = INT64_MAX, last = 0;
            for (int g = 0; g < GROUPS; ++g) {
                if (from[r][g] >= to[r][g]) continue;
                first = least(first, from[r][g]), last = most(last, to[r][g]);
            }
            if (first >= last) continue;
            ranges[count][0] = first, ranges[count++][1] = last;
        }
        if (count < 2) return;
        if (ranges[0][0] > ranges[1][0]) std::swap(ranges[0], ranges[1]);
        if (ranges[1][0] > ranges[0][1]) return;
        ranges[0][1] = most(ranges[0][1], ranges[1][1]);
        count = 1;
    }
};

// Sets blocked pairs of a tile [key][GROUP] to -inf, by the runs.
REGARD_INLINE void close_by_runs(const Seen &seen, int g, Span span, float *tile, int64_t ld) {
    I low[2][VECTORS], high[2][VECTORS];
    for (int r = 0; r < 2; ++r)
        EACH(n, VECTORS) {
            const int from = r < seen.runs ? r : 0;
            std::memcpy(&low[r][n], seen.low[from] + g * GROUP + n * LANES, sizeof(I));
            std::memcpy(&high[r][n], seen.high[from] + g * GROUP + n * LANES, sizeof(I));
        }
    change(tile, span.last - span.first, ld, [&](F x, int64_t k, int n) {
        const I key = all(int32_t(span.first + k));
        const I one = (key >= low[0][n]) & (key < high[0][n]), two = (key >= low[1][n]) & (key < high[1][n]);
        return pick(one | two, x, all(-INF));
    });
}

// The pairs of a group that a bool tensor allows, as a bit a lane for each key. 0: none of them, 2: all, 1: some.
inline int dense_bits(const Arguments &a, int64_t b, int64_t h, int64_t first, int64_t rows, Span span,
                      uint32_t *bits) {
    const int64_t keys = span.last - span.first;
    const uint8_t flip = uint8_t(a.negated != 0);
    std::memset(bits, 0, keys * sizeof(uint32_t));
    uint8_t every = 1, some = 0;
    for (int64_t lane = 0; lane < GROUP; ++lane) {
        const int64_t i = most(0, least(first + lane, rows - 1));
        const uint8_t *row = a.dense.at(b, h) + i * a.dense.q + span.first * a.dense.k;
        const auto look = [&](int64_t step) __attribute__((always_inline)) {
            for (int64_t k = 0; k < keys; ++k) {
                const uint8_t open = uint8_t(row[k * step] != 0) ^ flip;
                bits[k] |= uint32_t(open) << lane;
                some |= open, every &= open;
            }
        };
        if (a.dense.k == 1) look(1);  // a loop of whole vectors
        else look(a.dense.k);
    }
    return every ? 2 : some;
}

REGARD_INLINE void close_by_bits(const uint32_t *bits, int64_t keys, float *tile, int64_t ld) {
    U own[VECTORS];
    EACH(n, VECTORS)
        for (int lane = 0; lane < LANES; ++lane) own[n][lane] = uint32_t(1) << (n * LANES + lane);
    change(tile, keys, ld, [&](F x, int64_t k, int n) { return pick((all(bits[k]) & own[n]) != 0, x, all(-INF)); });
}

template <class T>  // a number, or a vector of them
REGARD_INLINE T mix(T x) {
    x = (x ^ (x >> 16)) * 0x7FEB352Du;
    x = (x ^ (x >> 15)) * 0x846CA68Bu;
    return x ^ (x >> 16);
}

// One number a row, from which the pairs of the row are drawn (kernels/reference.py has the rule).
inline void row_seeds(const Arguments &a, int64_t b, int64_t h, int64_t first, uint32_t *seeds) {
    const uint32_t head = mix(mix(uint32_t(a.seed)) + uint32_t(b * a.H + h));
    for (int64_t lane = 0; lane < BLOCK; ++lane) seeds[lane] = mix(head + uint32_t(first + lane));
}

// What a kept weight is multiplied by, 0 where dropout drops the pair.
REGARD_INLINE F kept(const Arguments &a, const uint32_t *seeds, int64_t key) {
    U seed;
    std::memcpy(&seed, seeds, sizeof(U));
    const U drawn = mix(seed + all(uint32_t(key)));
    return pick(I(drawn >= all(uint32_t(a.threshold))), all(float(a.raised)), F{});
}
}  // namespace
