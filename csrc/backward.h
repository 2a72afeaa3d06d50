// Backward, for the normalisers of forward.h: weights are made again tile by tile from the row numbers of the forward
// pass, and the stages are walked back. One pass over the pairs of a key head gives every gradient.
#pragma once
#include "forward.h"

namespace {
constexpr int64_t BACK_KEYS = 64;

struct BackwardRoom {
    float *query, *lifted, *grad, *dquery, *weights, *slopes, *caps, *query_rows, *grad_rows, *keys, *keys_lifted;
    float *values, *pack, *delta, *inverse, *peak, *row_sums, *falling_sums;
    uint32_t *bits;

    BackwardRoom(const Arguments &a, Arena &arena) {
        const int64_t queries = BLOCK * a.D, tile = BACK_KEYS * BLOCK;
        query = arena.take(queries), lifted = arena.take(queries), dquery = arena.take(queries);
        grad = arena.take(BLOCK * a.Dv), pack = arena.take(BLOCK * most(a.D, a.Dv));
        weights = arena.take(tile), slopes = arena.take(tile), caps = arena.take(tile);
        query_rows = arena.take(BLOCK * padded_width(a.D)), grad_rows = arena.take(BLOCK * padded_width(a.Dv));
        keys = arena.take(BACK_KEYS * a.D), keys_lifted = arena.take(BACK_KEYS * a.D);
        values = arena.take(BACK_KEYS * a.Dv);
        delta = arena.take(BLOCK), inverse = arena.take(BLOCK), peak = arena.take(BLOCK), row_sums = arena.take(BLOCK);
        falling_sums = arena.take((a.D + 1) * GROUP);  // additive: sums of slope times 1 / (e^2x + 1), and of slopes
        bits = reinterpret_cast<uint32_t *>(arena.take(BACK_KEYS));
    }
};

// Where the gradients of one key head (and one split of its queries) are summed.
struct Target {
    float *dkey, *dvalue, *dbias, *ddiagonal, *dweight;
    int64_t split;
};

// Whether one tile holds all the keys of a block.
inline bool in_one_tile(const Block &block) {
    return block.seen.count == 1 && block.seen.ranges[0][1] - block.seen.ranges[0][0] <= BACK_KEYS;
}

// What a row needs beside its scores: maximum, 1 / total, delta = grad . output - grad of its log-sum-exp. Where one
// tile holds all the keys, the first part of delta is summed from the very numbers that it is subtracted from.
inline void open_rows(const Block &block, const BackwardRoom &room) {
    const Arguments &a = block.a;
    const int64_t row = (block.b * a.H + block.h) * a.Tq + block.first, all_rows = a.B * a.H * a.Tq;
    for (int64_t lane = 0; lane < BLOCK; ++lane) {
        room.peak[lane] = room.inverse[lane] = room.delta[lane] = room.row_sums[lane] = 0.0f;
        if (lane >= block.rows || a.normalize != SOFTMAX) continue;
        const float total = a.rows[all_rows + row + lane];
        room.peak[lane] = a.rows[row + lane];
        room.inverse[lane] = total > 0 ? 1.0f / total : 0.0f;
        room.delta[lane] = a.grad_lse ? -a.grad_lse[row + lane] : 0.0f;
        if (in_one_tile(block)) continue;
        const float *grad = room.grad_rows + lane * padded_width(a.Dv);
        if (a.carried)
            for (int64_t c = 0; c < a.Dv; ++c) room.pack[c] = a.rows[(2 + c) * all_rows + row + lane];
        else
            widen(a.result.data, a.kind, a.result.place(block.b, block.h, block.first + lane), a.Dv, room.pack);
        F sums = {};
        float rest = 0;
        int64_t c = 0;
        for (; c + LANES <= a.Dv; c += LANES) sums += load(room.pack + c) * load(grad + c);
        for (; c < a.Dv; ++c) rest += room.pack[c] * grad[c];
        room.delta[lane] += sum(sums) + rest;
    }
}

inline void weigh_again(const Block &block, int g, int64_t keys, const BackwardRoom &room, float *tile, int64_t ld) {
    if (block.a.normalize != SOFTMAX) return weigh_each(block, tile, keys, ld);
    F peak[VECTORS], inverse[VECTORS];
    EACH(n, VECTORS) {
        peak[n] = load(room.peak + g * GROUP + n * LANES);
        inverse[n] = load(room.inverse + g * GROUP + n * LANES);
    }
    change(tile, keys, ld, [&](F x, int64_t, int n) { return exp(x - peak[n]) * inverse[n]; });
}

// From the gradient of the weights (in slopes) to that of the scores, times `factor`; dropped weights become 0.
template <int NORMALIZE>
void slope_tile(const Block &block, int g, Span span, const BackwardRoom &room, float *weights, float *slopes,
                int64_t ld, float factor) {
    const Arguments &a = block.a;
    F delta[VECTORS], sums[VECTORS] = {};
    EACH(n, VECTORS) delta[n] = load(room.delta + g * GROUP + n * LANES);
    if (NORMALIZE == SOFTMAX && in_one_tile(block))
        EACH(n, VECTORS) {
            F total = {};
            for (int64_t k = 0; k < span.last - span.first; ++k) {
                const F weight = load(weights + k * ld + n * LANES), slope = load(slopes + k * ld + n * LANES);
                const uint32_t *seeds = block.seeds + g * GROUP + n * LANES;
                total += weight * slope * (a.dropped ? kept(a, seeds, span.first + k) : all(1.0f));
            }
            delta[n] += total;
        }
    for (int64_t k = 0; k < span.last - span.first; ++k)
        EACH(n, VECTORS) {
            float *at = slopes + k * ld + n * LANES, *weight_at = weights + k * ld + n * LANES;
            const F weight = load(weight_at);
            F slope = load(at);
            if (a.dropped) {
                const F keep = kept(a, block.seeds + g * GROUP + n * LANES, span.first + k);
                slope *= keep;
                store(weight_at, weight * keep);
            }
            if (NORMALIZE == SOFTMAX) slope = weight * (slope - delta[n]);
            else if (NORMALIZE == SIGMOID) slope = slope * weight * (1.0f - weight);
            else slope = pick(weight > 0.0f, slope, weight);
            if (NORMALIZE == SIGMOID) sums[n] += slope;
            store(at, slope * factor);
        }
    if (NORMALIZE == SIGMOID)
        EACH(n, VECTORS) add_to(room.row_sums + g * GROUP + n * LANES, sums[n]);
}

inline void add_bias_gradient(const Block &block, int g, Span span, const float *slopes, int64_t ld, float *dbias) {
    const Pairs<float> &x = block.a.dbias;
    const int64_t keys = span.last - span.first, top = block.first + g * GROUP;
    const int there = int(least(GROUP, block.rows - g * GROUP));
    float *to = dbias + block.b * x.b + block.h * x.h + span.first * x.k;
    if (x.q == 0) {  // sums of sums here too
        float whole = 0;
        for (int64_t k = 0; k < keys; ++k) {
            float line = 0;
            for (int lane = 0; lane < there; ++lane) line += slopes[k * ld + lane];
            if (x.k) to[k * x.k] += line;
            else whole += line;
        }
        if (!x.k) to[0] += whole;
        return;
    }
    int64_t k = 0;
    for (; x.k == 1 && there == GROUP && k + LANES <= keys; k += LANES)
        EACH(n, VECTORS) {
            F y[LANES];
            EACH(m, LANES) y[m] = load(slopes + (k + m) * ld + n * LANES);
            transpose(y);
            EACH(lane, LANES) add_to(to + (top + n * LANES + lane) * x.q + k, y[lane]);
        }
    for (; k < keys; ++k)
        for (int lane = 0; lane < there; ++lane) to[(top + lane) * x.q + k * x.k] += slopes[k * ld + lane];
}

inline void add_diagonal_gradient(const Block &block, int g, Span span, const float *slopes, int64_t ld, float *to) {
    for (int64_t k = span.first; k < span.last; ++k, slopes += ld)
        EACH(n, VECTORS)
            add_to(to + k - (block.first + g * GROUP + n * LANES) - (LANES - 1), reversed(load(slopes + n * LANES)));
}

// Additive: with r = 1 / (e^(2 (q + k)) + 1), tanh is 1 - 2 r and its slope 4 r (1 - r). Sums over keys go to dquery
// (times 4 w in the end), sums over lanes to dkey, slope times r to falling_sums.
template <bool FARAWAY>
void additive_slopes(const Block &block, int g, const Keys &keys, int64_t from, int64_t count, const float *slopes,
                     int64_t ld, const BackwardRoom &room, float *dkey, int64_t stride) {
    const int64_t D = block.a.D;
    const float *w = block.a.weight.at(block.b, block.h);
    const float *query = block.query + g * D * GROUP, *lifted = block.lifted + g * D * GROUP;
    float *dquery = room.dquery + g * D * GROUP;
    for (int64_t k = 0; k < count; ++k, slopes += ld) {
        F slope[VECTORS];
        EACH(n, VECTORS) {
            slope[n] = load(slopes + n * LANES);
            add_to(room.falling_sums + D * GROUP + n * LANES, slope[n]);
        }
        const float *key = keys.rows.row(from + k), *key_lifted = keys.lifted + (from + k) * D;
        const auto column = [&](int64_t d) {
            F across = {};
            EACH(n, VECTORS) {
                const int64_t at = d * GROUP + n * LANES;
                const F x = rising<FARAWAY>(query + at, lifted + at, all(key[d]), all(key_lifted[d]));
                const F r = falling<FARAWAY>(x);
                const F change = (x * r) * r * slope[n];  // x r^2 is r (1 - r), and keeps its digits at both ends
                add_to(dquery + at, change);
                add_to(room.falling_sums + at, slope[n] * r);
                across += change;
            }
            return across;
        };
        int64_t d = 0;
        for (; d + LANES <= D; d += LANES) {
            F changes[LANES], total = {};
            EACH(m, LANES) changes[m] = column(d + m);
            transpose(changes);
            EACH(m, LANES) total += changes[m];
            add_to(dkey + k * stride + d, total * load(w + d) * 4.0f);
        }
        for (; d < D; ++d) dkey[k * stride + d] += sum(column(d)) * w[d] * 4.0f;
    }
}

inline void multiply(float *tile, const float *by, int64_t keys, int64_t ld, float factor) {
    change(tile, keys, ld,
           [&](F x, int64_t k, int n) { return x * (by ? load(by + k * ld + n * LANES) * factor : all(factor)); });
}

inline void blank(float *tile, int64_t from, int64_t to, int64_t ld) {
    for (int64_t k = from; k < to; ++k) std::memset(tile + k * ld, 0, GROUP * sizeof(float));
}

// One group's weights and slopes in the tiles, its share of dquery and biases; false where it sees nothing here.
template <int SCORE>
bool backward_group(const Block &block, int g, Span span, const Keys &keys, int64_t first, const Floats &values,
                    const BackwardRoom &room, const Target &target) {
    const Arguments &a = block.a;
    const int64_t from = span.first - first, count = span.last - span.first, ld = BLOCK;
    float *weights = room.weights + from * ld + g * GROUP, *slopes = room.slopes + from * ld + g * GROUP;
    float *caps = room.caps + from * ld + g * GROUP;
    float *bends = a.softcap > 0 ? caps : nullptr;
    if (!scores_of<SCORE>(block, g, span, keys, first, room.bits, weights, ld, bends)) return false;
    weigh_again(block, g, count, room, weights, ld);
    product<true, false>(count, a.Dv, values.row(from), values.stride, room.grad + g * a.Dv * GROUP, GROUP, slopes, ld);
    const bool between = a.softcap > 0 || target.dbias || target.ddiagonal;
    const float factor = SCORE == DOT ? block.scale : 1.0f, now = between ? 1.0f : factor;
    if (a.normalize == SOFTMAX) slope_tile<SOFTMAX>(block, g, span, room, weights, slopes, ld, now);
    else if (a.normalize == SIGMOID) slope_tile<SIGMOID>(block, g, span, room, weights, slopes, ld, now);
    else slope_tile<RELU>(block, g, span, room, weights, slopes, ld, now);
    if (target.dbias) add_bias_gradient(block, g, span, slopes, ld, target.dbias);
    if (target.ddiagonal) add_diagonal_gradient(block, g, span, slopes, ld, target.ddiagonal);
    if (between) multiply(slopes, bends, count, ld, factor);
    float *dkey = target.dkey + span.first * padded_width(a.D);
    if constexpr (SCORE == DOT)
        product<false, true>(a.D, count, keys.rows.row(from), keys.rows.stride, slopes, ld,
                             room.dquery + g * a.D * GROUP, GROUP);
    else if (keys.far) additive_slopes<true>(block, g, keys, from, count, slopes, ld, room, dkey, padded_width(a.D));
    else additive_slopes<false>(block, g, keys, from, count, slopes, ld, room, dkey, padded_width(a.D));
    return true;
}

// grad of keys or values += tile^T rows, over the lanes [low, high) that saw something.
inline void add_products(const float *tile, int64_t keys, int64_t low, int64_t high, const float *rows, int64_t width,
                         float *to) {
    for (int64_t c = 0; c < width; c += GROUP)
        product<true, true>(keys, high - low, tile + low, BLOCK, rows + low * width + c, width, to + c, width);
}

template <int SCORE>
void backward_keys(const Block &block, int64_t first, int64_t stop, const BackwardRoom &room, const Target &target) {
    const Arguments &a = block.a;
    const Keys keys = open_keys<SCORE>(block, first, stop - first, room.keys, room.keys_lifted);
    const Floats values = rows_of(a.value, a.kind, block.b, block.hkv, first, stop - first, a.Dv, room.values);
    int low = GROUPS, high = 0;
    for (int g = 0; g * GROUP < block.rows; ++g) {
        const Span span = block.seen.span(g, first, stop);
        float *weights = room.weights + g * GROUP, *slopes = room.slopes + g * GROUP;
        if (span.first < span.last && backward_group<SCORE>(block, g, span, keys, first, values, room, target)) {
            low = g < low ? g : low, high = g + 1;
            blank(weights, 0, span.first - first, BLOCK), blank(weights, span.last - first, stop - first, BLOCK);
            blank(slopes, 0, span.first - first, BLOCK), blank(slopes, span.last - first, stop - first, BLOCK);
        } else {
            blank(weights, 0, stop - first, BLOCK), blank(slopes, 0, stop - first, BLOCK);
        }
    }
    if (low >= high) return;
    const int64_t from = low * GROUP, to = least(high * GROUP, block.rows);
    const int64_t D = padded_width(a.D), Dv = padded_width(a.Dv);
    add_products(room.weights, stop - first, from, to, room.grad_rows, Dv, target.dvalue + first * Dv);
    if (SCORE == DOT) add_products(room.slopes, stop - first, from, to, room.query_rows, D, target.dkey + first * D);
}

inline void close_additive(const Block &block, const BackwardRoom &room, float *dweight) {
    const Arguments &a = block.a;
    const float *w = a.weight.at(block.b, block.h);
    for (int64_t n = 0; n < (block.rows + GROUP - 1) / GROUP * a.D; ++n)
        EACH(m, VECTORS) {
            float *at = room.dquery + n * GROUP + m * LANES;
            store(at, load(at) * (4.0f * w[n % a.D]));
        }
    const auto total = [&](int64_t d) {
        F sums = {};
        EACH(n, VECTORS) sums += load(room.falling_sums + d * GROUP + n * LANES);
        return sum(sums);
    };
    const float slopes = total(a.D);
    for (int64_t d = 0; d < a.D; ++d) dweight[block.h * a.D + d] += slopes - 2.0f * total(d);
}

// How the normalisers of forward.h are walked back; threshold_backward.h has another way.
struct Tiles {
    const BackwardRoom back;

    Tiles(const Arguments &a, Arena &arena) : back(a, arena) {}
    static int64_t height(const Arguments &a) { return a.D + a.Dv > 128 ? BLOCK / 2 : BLOCK; }

    template <int SCORE>
    bool walk(const Block &block, const Target &target) {
        block.seen.each_tile(BACK_KEYS,
                             [&](int64_t k, int64_t stop) { backward_keys<SCORE>(block, k, stop, back, target); });
        return true;
    }
};

template <int SCORE, class Way>
bool backward_block(const Arguments &a, int64_t b, int64_t h, int64_t first, int64_t rows, Way &way,
                    const Target &target) {
    const BackwardRoom &room = way.back;
    Block block{a, b, h, h / (a.H / a.Hkv), first, rows, 1, room.query, room.lifted, false, {}, {}};
    bool finite = open_block<SCORE>(block, room.pack);
    padded_rows(a.grad_output, a.kind, b, h, first, rows, a.Dv, room.grad_rows);
    finite &= rows_to_lanes({room.grad_rows, padded_width(a.Dv)}, rows, a.Dv, 1.0f, room.grad);
    if (SCORE == DOT) padded_rows(a.query, a.kind, b, h, first, rows, a.D, room.query_rows);
    open_rows(block, room);
    std::memset(room.dquery, 0, BLOCK * a.D * sizeof(float));
    if (SCORE == ADDITIVE) std::memset(room.falling_sums, 0, (a.D + 1) * GROUP * sizeof(float));
    Target own = target;
    if (own.dbias) own.dbias += target.split * a.dbias_split;
    const int64_t a_head = a.ddiagonal_split / (a.B * a.H);
    if (own.ddiagonal) own.ddiagonal += target.split * a.ddiagonal_split + (b * a.H + h) * a_head;
    finite &= way.template walk<SCORE>(block, own);
    if (SCORE == ADDITIVE) close_additive(block, room, target.dweight);
    const int64_t row = (b * a.H + h) * a.Tq + first;
    if (a.drow) std::memcpy(a.drow + row, room.row_sums, rows * sizeof(float));
    alignas(64) float ones[GROUP];
    for (float &one : ones) one = 1.0f;
    for (int g = 0; g * GROUP < rows; ++g)
        finite &= lanes_to_rows(room.dquery + g * a.D * GROUP, ones, rows - g * GROUP, a.D, a.dquery, FLOAT32,
                                (row + g * GROUP) * a.D, a.D, room.pack);
    return finite;
}

inline bool all_finite(const float *x, int64_t count) {
    F odd = {};
    for (int64_t n = 0; n + LANES <= count; n += LANES) odd += load(x + n) * 0.0f;
    return sum(odd) == 0.0f;
}

// All the queries of one key head that fall to one split: blocks are dealt out in turn.
template <int SCORE, class Way>
bool backward_head(const Arguments &a, int64_t split, int64_t b, int64_t hkv, Way &way) {
    const int64_t D = padded_width(a.D), Dv = padded_width(a.Dv), at = (split * a.B + b) * a.Hkv + hkv;
    const int64_t height = Way::height(a), blocks = (a.Tq + height - 1) / height;
    const Target target{a.dkey + at * a.Tk * D, a.dvalue + at * a.Tk * Dv, a.dbias.data, a.ddiagonal,
                        a.dweight ? a.dweight + (split * a.B + b) * a.H * a.D : nullptr, split};
    std::memset(target.dkey, 0, a.Tk * D * sizeof(float));
    std::memset(target.dvalue, 0, a.Tk * Dv * sizeof(float));
    const int64_t group = a.H / a.Hkv;
    bool finite = true;
    for (int64_t h = hkv * group; h < (hkv + 1) * group; ++h)
        for (int64_t n = split; n < blocks; n += a.splits)
            finite &= backward_block<SCORE>(a, b, h, n * height, least(height, a.Tq - n * height), way, target);
    return finite && all_finite(target.dkey, a.Tk * D) && all_finite(target.dvalue, a.Tk * Dv);
}

template <int SCORE, class Way>
int32_t backward(const Arguments &a) {
    if (!finite_keys(a)) return REGARD_NOT_FINITE;
    // In turn: heads that add to the same bias follow one another, and only splits, which own rows, run side by side.
    const int64_t work = a.B * a.Hkv * a.splits, together = a.in_turn ? a.splits : work;
    int32_t status = REGARD_OK;
    for (int64_t start = 0; start < work && status == REGARD_OK; start += together)
        status = on_threads(a.threads, together, floats_of<Way>(a), [&](int64_t n) {
            Way way(a, arena());
            const int64_t split = (start + n) % a.splits, head = (start + n) / a.splits;
            const bool finite = backward_head<SCORE>(a, split, head / a.Hkv, head % a.Hkv, way);
            return finite ? REGARD_OK : REGARD_NOT_FINITE;
        });
    return status;
}
}  // namespace
