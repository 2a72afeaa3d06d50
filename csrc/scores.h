// Stage one: scores of a group of queries (lanes) and a range of keys, a tile [key][lane], and what is done to them
// before they are normalised: soft-cap, bias, mask. Blocked pairs are -inf.
#pragma once
#include "room.h"
#include "rows.h"

namespace {
constexpr int64_t KEYS = 192;  // of a tile at most: what a block reads again and again stays in the second cache
constexpr int64_t FEW = 4;    // queries
constexpr float FAR = 20.0f;  // beyond this, exponentials of query and key are not taken apart

// A block of queries of one head.
struct Block {
    const Arguments &a;
    int64_t b, h, hkv, first, rows;
    float scale;
    float *query;       // [group][D][GROUP], times what makes a score of it
    float *lifted;      // additive: exp(2 query), likewise
    bool far;           // additive: some |query| > FAR
    Seen seen;
    alignas(64) uint32_t seeds[BLOCK];
};

inline float scale_of(const Arguments &a, int64_t b, int64_t h) {
    return float(a.factor) * (a.scale.data ? *a.scale.at(b, h) : 1.0f);
}

// e^(2 x) within reach of FAR; `size` keeps the largest |x|.
REGARD_INLINE F lift(F x, F &size) {
    size = larger(larger(x, -x), size);
    return exp(2.0f * larger(all(-FAR), smaller(all(FAR), x)));
}

template <int SCORE>
bool open_block(Block &block, float *room) {
    const Arguments &a = block.a;
    block.scale = scale_of(a, block.b, block.h);
    const float factor = SCORE == ADDITIVE ? 1.0f : a.softcap > 0 ? block.scale / float(a.softcap) : block.scale;
    block.seen.find(a, block.b, block.h, block.first, block.rows);
    if (a.dropped) row_seeds(a, block.b, block.h, block.first, block.seeds);
    const Floats in = rows_of(a.query, a.kind, block.b, block.h, block.first, block.rows, a.D, room);
    const bool finite = rows_to_lanes(in, block.rows, a.D, factor, block.query);
    if constexpr (SCORE == ADDITIVE) {
        F size = {};
        for (int64_t n = 0; n < (block.rows + GROUP - 1) / GROUP * GROUP * a.D; n += LANES)
            store(block.lifted + n, lift(load(block.query + n), size));
        block.far = any(size > all(FAR));
    }
    return finite;
}

// Keys of a tile, ready for their score.
struct Keys {
    Floats rows;
    const float *lifted;  // additive: exp(2 key) [key][D]
    bool far;
};

template <int SCORE>
Keys lift_keys(const Block &block, Floats rows, int64_t count, float *lifted) {
    Keys keys{rows, lifted, block.far};
    if constexpr (SCORE == ADDITIVE) {
        const int64_t D = block.a.D;
        F size = {};
        for (int64_t k = 0; k < count; ++k) {
            const float *row = rows.row(k);
            int64_t d = 0;
            for (; d + LANES <= D; d += LANES) store(lifted + k * D + d, lift(load(row + d), size));
            for (; d < D; ++d) lifted[k * D + d] = lift(all(row[d]), size)[0];
        }
        keys.far = block.far || any(size > all(FAR));
    }
    return keys;
}

template <int SCORE>
Keys open_keys(const Block &block, int64_t first, int64_t count, float *room, float *lifted) {
    const Arguments &a = block.a;
    return lift_keys<SCORE>(block, rows_of(a.key, a.kind, block.b, block.hkv, first, count, a.D, room), count, lifted);
}

// x = e^(2 (q + k)) for one column of a query group and one key, and r = 1 / (x + 1): tanh(q + k) is 1 - 2 r.
template <bool FARAWAY>
REGARD_INLINE F rising(const float *query, const float *lifted, F key, F key_lifted) {
    if constexpr (FARAWAY) return exp2_bounded((load(query) + key) * (2 * LOG2E));
    else return load(lifted) * key_lifted;
}
template <bool FARAWAY>
REGARD_INLINE F falling(F x) {
    if constexpr (FARAWAY) return 1.0f / (x + 1.0f);
    else return reciprocal(x + 1.0f);
}

template <int ROWS, bool FARAWAY>
REGARD_INLINE void additive_tile(const Block &block, int g, const Keys &keys, int64_t at, float total, float *tile,
                                 int64_t ld) {
    const Arguments &a = block.a;
    const float *w = a.weight.at(block.b, block.h);
    const float *query = block.query + g * a.D * GROUP, *lifted = block.lifted + g * a.D * GROUP;
    F sums[ROWS][VECTORS] = {}, before[ROWS][VECTORS] = {};
    for (int64_t d = 0; d < a.D; ++d) {
        if (d % 16 == 0)  // sums of sums: long ones stay accurate
            EACH(r, ROWS) EACH(n, VECTORS) before[r][n] += sums[r][n], sums[r][n] = F{};
        EACH(r, ROWS) EACH(n, VECTORS) {
            const int64_t lane = d * GROUP + n * LANES;
            const F key = all(keys.rows.row(at + r)[d]), key_lifted = all(keys.lifted[(at + r) * a.D + d]);
            sums[r][n] += w[d] * falling<FARAWAY>(rising<FARAWAY>(query + lane, lifted + lane, key, key_lifted));
        }
    }
    EACH(r, ROWS) EACH(n, VECTORS) store(tile + r * ld + n * LANES, total - 2.0f * (before[r][n] + sums[r][n]));
}

// Few queries leave most lanes empty. Of theirs the columns are the lanes, one query and one key at a time.
template <bool FARAWAY>
void additive_rows(const Block &block, const Keys &keys, int64_t from, int64_t to, float total, float *tile,
                   int64_t ld) {
    const int64_t D = block.a.D;
    const float *w = block.a.weight.at(block.b, block.h);
    alignas(64) float query[256], lifted[256];
    for (int64_t k = from; k < to; ++k) std::memset(tile + (k - from) * ld, 0, GROUP * sizeof(float));
    for (int64_t lane = 0; lane < block.rows; ++lane) {
        const float *from_query = block.query + lane, *from_lifted = block.lifted + lane;
        for (int64_t d = 0; d < D; ++d) query[d] = from_query[d * GROUP], lifted[d] = from_lifted[d * GROUP];
        for (int64_t k = from; k < to; ++k) {
            const float *key = keys.rows.row(k), *up = keys.lifted + k * D;
            F sums = {};
            for (int64_t d = 0; d < D; d += LANES) {
                const F x = rising<FARAWAY>(query + d, lifted + d, load(key + d), load(up + d));
                sums += load(w + d) * falling<FARAWAY>(x);
            }
            tile[(k - from) * ld + lane] = total - 2.0f * sum(sums);
        }
    }
}

template <bool FARAWAY>
void additive_tiles(const Block &block, int g, const Keys &keys, int64_t from, int64_t to, float *tile, int64_t ld) {
    const float *w = block.a.weight.at(block.b, block.h);
    double total = 0;
    for (int64_t d = 0; d < block.a.D; ++d) total += w[d];
    if (block.rows <= FEW && block.a.D % LANES == 0)
        return additive_rows<FARAWAY>(block, keys, from, to, float(total), tile, ld);
    int64_t k = from;
    for (; k + 2 <= to; k += 2) additive_tile<2, FARAWAY>(block, g, keys, k, float(total), tile + (k - from) * ld, ld);
    if (k < to) additive_tile<1, FARAWAY>(block, g, keys, k, float(total), tile + (k - from) * ld, ld);
}

// Scores of keys [from, to) of a tile of keys, before soft-cap, bias and mask.
template <int SCORE>
void score_tile(const Block &block, int g, const Keys &keys, int64_t from, int64_t to, float *tile, int64_t ld) {
    const int64_t D = block.a.D;
    if constexpr (SCORE == DOT)
        product<true, false>(to - from, D, keys.rows.row(from), keys.rows.stride, block.query + g * D * GROUP, GROUP,
                             tile, ld);
    else if (keys.far) additive_tiles<true>(block, g, keys, from, to, tile, ld);
    else additive_tiles<false>(block, g, keys, from, to, tile, ld);
}

// Adds a tile of a tensor of pairs: to[key][lane] += from(row, key).
inline void add_pairs(const Block &block, int g, Span span, float *tile, int64_t ld) {
    const Arguments &a = block.a;
    const Pairs<const float> &x = a.bias;
    const float *from = x.at(block.b, block.h) + span.first * x.k;
    const int64_t keys = span.last - span.first, top = block.first + g * GROUP, last = block.first + block.rows - 1;
    if (x.q == 0) return change(tile, keys, ld, [&](F y, int64_t k, int) { return y + from[k * x.k]; });
    const float *rows[GROUP];
    for (int lane = 0; lane < GROUP; ++lane) rows[lane] = from + least(top + lane, last) * x.q;
    int64_t k = 0;
    for (; x.k == 1 && k + LANES <= keys; k += LANES)
        EACH(n, VECTORS) {
            F y[LANES];
            EACH(lane, LANES) y[lane] = load(rows[n * LANES + lane] + k);
            transpose(y);
            EACH(m, LANES) add_to(tile + (k + m) * ld + n * LANES, y[m]);
        }
    for (; k < keys; ++k)
        for (int lane = 0; lane < GROUP; ++lane) tile[k * ld + lane] += rows[lane][k * x.k];
}

// The diagonals of a tile run backwards along its lanes.
inline const float *diagonal_at(const Block &block, int g, int n, int64_t key) {
    return block.a.diagonal.at(block.b, block.h) + key - (block.first + g * GROUP + n * LANES) - (LANES - 1);
}

inline void add_diagonals(const Block &block, int g, Span span, float *tile, int64_t ld) {
    for (int64_t k = span.first; k < span.last; ++k, tile += ld)
        EACH(n, VECTORS) add_to(tile + n * LANES, reversed(load(diagonal_at(block, g, n, k))));
}

// Soft-cap; `slopes`, where given, gets the cap's derivative of every pair.
inline void cap(const Block &block, int64_t keys, float *tile, int64_t ld, float *slopes) {
    const float height = float(block.a.softcap);
    for (int64_t k = 0; k < keys; ++k)
        EACH(n, VECTORS) {
            const F t = tanh(load(tile + k * ld + n * LANES));
            store(tile + k * ld + n * LANES, t * height);
            if (slopes) store(slopes + k * ld + n * LANES, 1.0f - t * t);
        }
}

// Everything between the score and the weights but a bool tensor, on keys [span.first, span.last).
inline void finish_scores(const Block &block, int g, Span span, float *tile, int64_t ld, float *slopes) {
    const Arguments &a = block.a;
    if (a.softcap > 0) cap(block, span.last - span.first, tile, ld, slopes);
    if (a.bias.data) add_pairs(block, g, span, tile, ld);
    if (a.diagonal.data) add_diagonals(block, g, span, tile, ld);
    if (span.ragged) close_by_runs(block.seen, g, span, tile, ld);
}

// Whether and how a bool tensor closes a tile: 0 none may meet, 1 some (in `bits`), 2 all.
inline int look_up(const Block &block, int g, Span span, uint32_t *bits) {
    if (!block.a.dense.data) return 2;
    return dense_bits(block.a, block.b, block.h, block.first + g * GROUP, block.first + block.rows, span, bits);
}

// Stage one whole: scores of a group and a span of keys, blocked pairs -inf; `first` is the first of `keys`. False, and
// nothing written, where no pair may meet.
template <int SCORE>
bool scores_of(const Block &block, int g, Span span, const Keys &keys, int64_t first, uint32_t *bits, float *tile,
               int64_t ld, float *slopes) {
    const int open = look_up(block, g, span, bits);
    if (!open) return false;
    score_tile<SCORE>(block, g, keys, span.first - first, span.last - first, tile, ld);
    finish_scores(block, g, span, tile, ld, slopes);
    if (open == 1) close_by_bits(bits, span.last - span.first, tile, ld);
    return true;
}
}  // namespace
