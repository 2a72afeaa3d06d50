// Backward, for normalisers with a threshold: the strips of threshold.h are made again, from known thresholds, and only
// the keys in them get gradients.
//     slope = d weight / d score at fixed threshold,  delta = sum(slope * dweight) / sum(slope)
//     dscore = slope * (dweight - delta)
#pragma once
#include "backward.h"
#include "threshold.h"

namespace {
struct Strips {
    ThresholdRoom front;
    const BackwardRoom back;
    float *changes, *part, *bends;

    Strips(const Arguments &a, Arena &arena) : front(a, height(a), arena), back(a, arena) {
        changes = arena.take((a.Tk + KEYS) * GROUP);  // gradients of the weights of a strip
        part = arena.take(BACK_KEYS * padded_width(most(a.D, a.Dv)));
        bends = arena.take(GROUP);  // mean of what alpha adds, by slope
    }
    static int64_t height(const Arguments &a) { return least(threshold_height(a), BLOCK / 2); }

    template <int SCORE>
    bool walk(const Block &block, const Target &target);
};

// (e^-t - 1 + t) / t^2, from `grown` = e^-t, for t <= 0.
REGARD_INLINE F curve(F t, F grown) {
    const F u = -t;
    const F p = polynomial(u, 1.0f / 40320, 1.0f / 5040, 1.0f / 720, 1.0f / 120, 1.0f / 24, 1.0f / 6, 0.5f);
    return pick(u < all(0.5f), p, (grown - 1.0f - u) / (u * u));
}

// The slope of a number that a strip was left with; that number becomes the weight. by_alpha: how the weight changes
// with entmax's alpha at a threshold that does not keep the sum; no difference of large numbers near alpha = 1.
template <int64_t KIND>
REGARD_INLINE F slope_of(F &weight, float power, F *by_alpha) {
    if constexpr (KIND == SPARSEMAX) return pick(weight > F{}, all(1.0f), F{});
    if constexpr (KIND == ENTMAX15) {
        const F root = weight;
        weight *= weight;
        return root;
    }
    const I inside = weight > all(FLT_MIN);
    const F log = log2_of(pick(inside, weight, all(1.0f)), F{}), grown = exp2_bounded(log * -power), l = log * LN2;
    if (by_alpha) *by_alpha = pick(inside, -weight * l * l * curve(l * power, grown), F{});
    return pick(inside, weight * grown, F{});
}

// Gradients of the weights of a strip, and each lane's delta and bend: what keeps the sum of its weights.
template <int64_t KIND>
void changes_of(const Block &block, int g, const Strip &strip, const Rule &rule, const float *factors,
                const Strips &room) {
    const Arguments &a = block.a;
    Total slopes = {}, products = {}, bends = {};
    for (int64_t first = 0; first < strip.count; first += BACK_KEYS) {
        const int64_t count = least(BACK_KEYS, strip.count - first);
        float *scores = strip.scores + first * GROUP, *changes = room.changes + first * GROUP;
        const int32_t *keys = strip.keys + first;
        const Floats values = kept_rows(a.value, a.kind, block.b, block.hkv, keys, count, a.Dv, room.back.values);
        product<true, false>(count, a.Dv, values.data, values.stride, room.back.grad + g * a.Dv * GROUP, GROUP, changes,
                             GROUP);
        F slope_part[VECTORS] = {}, product_part[VECTORS] = {}, bend_part[VECTORS] = {}, by_alpha = {};
        for (int64_t k = 0; k < count; ++k)
            EACH(n, VECTORS) {
                const int64_t at = k * GROUP + n * LANES;
                F weight = load(scores + at), change = load(changes + at);
                if (KIND == ENTMAX) store(scores + at, weight *= load(factors + n * LANES));
                if (a.dropped) change *= kept(a, block.seeds + g * GROUP + n * LANES, keys[k]);
                const F slope = slope_of<KIND>(weight, rule.power, a.drow ? &by_alpha : nullptr);
                store(changes + at, change);
                slope_part[n] += slope;
                product_part[n] += slope * change;
                bend_part[n] += by_alpha;
            }
        slopes.add(slope_part), products.add(product_part), bends.add(bend_part);
    }
    EACH(n, VECTORS) {
        const I there = slopes.whole[n] > F{};
        store(room.back.delta + g * GROUP + n * LANES, pick(there, products.whole[n] / slopes.whole[n], F{}));
        store(room.bends + n * LANES, pick(there, bends.whole[n] / slopes.whole[n], F{}));
    }
}

// Of some rows of a strip: weights after dropout, and gradients of the scores, in tiles [row][GROUP].
template <int64_t KIND>
void slopes_of(const Block &block, int g, const Strip &strip, int64_t first, int64_t count, const Rule &rule,
               const Strips &room) {
    const Arguments &a = block.a;
    EACH(n, VECTORS) {
        const F delta = load(room.back.delta + g * GROUP + n * LANES), bend = load(room.bends + n * LANES);
        F alpha = {}, by_alpha = {};
        for (int64_t k = 0; k < count; ++k) {
            const int64_t from = (first + k) * GROUP + n * LANES, to = k * GROUP + n * LANES;
            F weight = load(strip.scores + from);
            const F slope = slope_of<KIND>(weight, rule.power, a.drow ? &by_alpha : nullptr);
            const F change = load(room.changes + from) - delta;
            if (a.dropped) weight *= kept(a, block.seeds + g * GROUP + n * LANES, strip.keys[first + k]);
            store(room.back.weights + to, weight);
            store(room.back.slopes + to, slope * change);
            alpha += (by_alpha - bend * slope) * change;
        }
        add_to(room.back.row_sums + g * GROUP + n * LANES, alpha);
    }
}

inline void add_rows(const float *rows, const int32_t *keys, int64_t count, int64_t width, float *to) {
    for (int64_t k = 0; k < count; ++k)
        for (int64_t c = 0; c < width; c += LANES) add_to(to + keys[k] * width + c, load(rows + k * width + c));
}

// Gradients of rows that a strip has kept: to[keys] += tile^T rows.
inline void add_kept(const float *tile, const int32_t *keys, int64_t count, int64_t lanes, const float *rows,
                     int64_t width, float *to, float *part) {
    if (keys[count - 1] - keys[0] == count - 1) {
        for (int64_t c = 0; c < width; c += GROUP)
            product<true, true>(count, lanes, tile, GROUP, rows + c, width, to + keys[0] * width + c, width);
        return;
    }
    for (int64_t c = 0; c < width; c += GROUP)
        product<true, false>(count, lanes, tile, GROUP, rows + c, width, part + c, width);
    add_rows(part, keys, count, width, to);
}

template <int SCORE>
void score_slopes(const Block &block, int g, const int32_t *keys, int64_t count, const Strips &room,
                  const Target &target) {
    const Arguments &a = block.a;
    const BackwardRoom &back = room.back;
    const int64_t lanes = least(GROUP, block.rows - g * GROUP), D = padded_width(a.D);
    for (int64_t k = 0; k < count && (target.dbias || target.ddiagonal); ++k) {
        const Span one{keys[k], keys[k] + 1, false};
        if (target.dbias) add_bias_gradient(block, g, one, back.slopes + k * GROUP, GROUP, target.dbias);
        if (target.ddiagonal) add_diagonal_gradient(block, g, one, back.slopes + k * GROUP, GROUP, target.ddiagonal);
    }
    const Floats rows = kept_rows(a.key, a.kind, block.b, block.hkv, keys, count, a.D, back.keys);
    const Keys lifted = lift_keys<SCORE>(block, rows, count, back.keys_lifted);
    if constexpr (SCORE == DOT) {
        if (a.softcap > 0) {
            score_tile<DOT>(block, g, lifted, 0, count, back.caps, GROUP);
            cap(block, count, back.caps, GROUP, back.caps);
        }
        multiply(back.slopes, a.softcap > 0 ? back.caps : nullptr, count, GROUP, block.scale);
        float *dquery = back.dquery + g * a.D * GROUP;
        product<false, true>(a.D, count, rows.data, rows.stride, back.slopes, GROUP, dquery, GROUP);
        add_kept(back.slopes, keys, count, lanes, back.query_rows + g * GROUP * D, D, target.dkey, room.part);
        return;
    }
    std::memset(room.part, 0, count * D * sizeof(float));
    if (lifted.far) additive_slopes<true>(block, g, lifted, 0, count, back.slopes, GROUP, back, room.part, D);
    else additive_slopes<false>(block, g, lifted, 0, count, back.slopes, GROUP, back, room.part, D);
    add_rows(room.part, keys, count, D, target.dkey);
}

template <int SCORE, int64_t KIND>
void backward_strip(const Block &block, int g, Strip &strip, const Rule &rule, Lanes &lanes,
                    const Strips &room, const Target &target) {
    const Arguments &a = block.a;
    alignas(64) float known[GROUP], factors[GROUP], row[GROUP];
    const int64_t there = least(GROUP, block.rows - g * GROUP), Dv = padded_width(a.Dv);
    std::memset(known, 0, sizeof known);
    std::memcpy(known, a.rows + (block.b * a.H + block.h) * a.Tq + block.first + g * GROUP, there * sizeof(float));
    weights_of<KIND, KIND == ENTMAX15 ? ROOTS : WEIGHTS>(strip, rule, lanes, known, factors, row);
    changes_of<KIND>(block, g, strip, rule, factors, room);
    for (int64_t first = 0; first < strip.count; first += BACK_KEYS) {
        const int64_t count = least(BACK_KEYS, strip.count - first);
        slopes_of<KIND>(block, g, strip, first, count, rule, room);
        add_kept(room.back.weights, strip.keys + first, count, there, room.back.grad_rows + g * GROUP * Dv, Dv,
                 target.dvalue, room.part);
        score_slopes<SCORE>(block, g, strip.keys + first, count, room, target);
    }
}

template <int SCORE>
bool Strips::walk(const Block &block, const Target &target) {
    const Arguments &a = block.a;
    const Rule rule(a, block.b, block.h);
    Lanes lanes[GROUPS];
    const float *known = a.rows + (block.b * a.H + block.h) * a.Tq + block.first;
    for (int g = 0; g * GROUP < block.rows; ++g) {
        lanes[g].start(rule, block.rows - g * GROUP, known + g * GROUP);
        front.strips[g].count = 0;
    }
    fill_strips<SCORE>(block, front, lanes);
    bool finite = rule.finite();
    for (int g = 0; g * GROUP < block.rows; ++g) {
        Strip &strip = front.strips[g];
        finite = finite && !any(lanes[g].odd);
        if (rule.kind == SPARSEMAX) backward_strip<SCORE, SPARSEMAX>(block, g, strip, rule, lanes[g], *this, target);
        else if (rule.kind == ENTMAX15) backward_strip<SCORE, ENTMAX15>(block, g, strip, rule, lanes[g], *this, target);
        else backward_strip<SCORE, ENTMAX>(block, g, strip, rule, lanes[g], *this, target);
    }
    return finite;
}
}  // namespace
