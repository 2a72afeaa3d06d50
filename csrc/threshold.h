// Forward, for normalisers with a threshold: sparsemax, entmax. They need a whole row, but few keys of it count.
//     scores = score(query, key)  ->  weights = powers of what is above tau  ->  output = sum of weights times values
// While the scores of a group of queries pass, a strip keeps the keys that may yet be above the threshold of some lane.
// Newton's steps then raise the thresholds from the left, and each pass leaves out what no lane needs any more.
#pragma once
#include "forward.h"

namespace {
constexpr int MOST_STEPS = 100;
constexpr float ENOUGH = 1e-6f;  // weights that sum to 1 but for this are settled: the step from there is exact
constexpr int64_t CHUNK = 16;    // rows that are summed plainly; what they sum to is added with compensation

// The keys that some lane of a group may need.
struct Strip {
    float *scores;  // [row][GROUP]; weights once they are found
    int32_t *keys;
    int64_t count;
};

// Weight of a score: max(unit * score - tau, 0)^(1 / power). Row numbers are `start` more than thresholds relative to
// the largest score; weights begin at most `reach` below it.
struct Rule {
    int64_t kind;
    float unit, power, reach, start;

    // Entmax of 1.5 and of 2 need no logarithms, but for the gradient of alpha.
    Rule(const Arguments &a, int64_t b, int64_t h) {
        const float least = 1.0f + 1e-6f, alpha = a.normalize == ENTMAX ? *a.alpha.at(b, h) : 1.5f;
        power = a.normalize == SPARSEMAX ? 1.0f : (alpha < least ? least : alpha) - 1.0f;
        kind = power == 1.0f ? SPARSEMAX : power == 0.5f ? ENTMAX15 : ENTMAX;
        if (a.normalize == ENTMAX && a.drow) kind = ENTMAX;
        unit = power;
        reach = kind == ENTMAX ? 1.000001f / power : 1.0f / unit;
        start = a.normalize == ENTMAX ? 1.0f : 0.0f;
    }
    bool finite() const { return power * 0.0f == 0.0f; }
};

// Of a group's lanes. Thresholds are high + low; under entmax of any alpha, 1 - low below the largest score.
struct Lanes {
    F peak[VECTORS], bound[VECTORS], reach[VECTORS], high[VECTORS], low[VECTORS], open[VECTORS];
    I odd;  // some score was not finite

    // `known`: row numbers, where there are some.
    void start(const Rule &rule, int64_t rows, const float *known) {
        odd = I{};
        EACH(n, VECTORS) {
            peak[n] = all(-INF);
            for (int lane = 0; lane < LANES; ++lane) {
                const bool there = n * LANES + lane < rows;
                bound[n][lane] = there ? -FLT_MAX : INF;
                const float from = there && known ? rule.start + 4e-7f - known[n * LANES + lane] : 0.0f;
                reach[n][lane] = there && known ? from / rule.unit : rule.reach;
            }
        }
    }
};

// Adds to a strip what of a tile [key][GROUP] may be above some threshold.
inline void sift(const float *tile, int64_t first, int64_t count, Strip &strip, Lanes &lanes) {
    F top[VECTORS], bound[VECTORS];
    I fine[VECTORS];
    EACH(n, VECTORS) top[n] = lanes.peak[n], fine[n] = all(-1);
    for (int64_t k = 0; k < count; ++k) {
        EACH(n, VECTORS) {
            const F x = load(tile + k * GROUP + n * LANES);
            top[n] = larger(x, top[n]);
            fine[n] &= x < all(INF);
        }
    }
    EACH(n, VECTORS) {
        lanes.odd |= ~fine[n];
        lanes.peak[n] = top[n];
        lanes.bound[n] = bound[n] = larger(lanes.bound[n], top[n] - lanes.reach[n]);
    }
    int64_t kept = strip.count;
    float *scores = strip.scores;
    int32_t *keys = strip.keys;
    for (int64_t k = 0; k < count; ++k) {
        I needed = {};
        EACH(n, VECTORS) {
            const F x = load(tile + k * GROUP + n * LANES);
            store(scores + kept * GROUP + n * LANES, x);
            needed |= x >= bound[n];
        }
        keys[kept] = int32_t(first + k);
        kept += any(needed);
    }
    strip.count = kept;
}

// Sums of a few rows, added up with what rounding took from them.
struct Total {
    F whole[VECTORS], lost[VECTORS];
    void add(const F *part) {
        EACH(n, VECTORS) {
            const F more = part[n] - lost[n], next = whole[n] + more;
            lost[n] = (next - whole[n]) - more, whole[n] = next;
        }
    }
};

// log2(1 + y) for y > -1, to a few units in its own last place also where y is small.
REGARD_INLINE F log2_above(F y) {
    const F u = 1.0f + y;
    return log2_of(u, (y - (u - 1.0f)) * reciprocal(u));
}

// (1 + y)^(1 / power), 0 where y <= -1.
REGARD_INLINE F raised(F y, float inverse) {
    return pick(y > all(-1.0f), exp2(log2_above(y) * inverse), F{});
}

enum Leave { SCORES, WEIGHTS, ROOTS };  // roots of weights, under entmax 1.5: slopes are multiples of them

// One pass over a strip at the thresholds of `lanes`: sums of weights and of their slopes at fixed threshold (times
// power). Rows that no lane needs go; of the others a strip is left with scores or weights.
template <int64_t KIND, int LEAVE>
void pass(Strip &strip, const Rule &rule, const Lanes &lanes, F *sums, F *slopes) {
    const float unit = rule.unit, inverse = 1.0f / rule.power;
    F high[VECTORS], low[VECTORS], open[VECTORS];
    EACH(n, VECTORS) {
        high[n] = KIND == ENTMAX ? lanes.peak[n] : lanes.high[n];
        low[n] = lanes.low[n], open[n] = lanes.open[n];
    }
    Total sum = {}, slope = {};
    float *scores = strip.scores;
    int32_t *keys = strip.keys;
    int64_t kept = 0;
    for (int64_t chunk = 0; chunk < strip.count; chunk += CHUNK) {
        F part[VECTORS] = {}, slope_part[VECTORS] = {};
        const int64_t end = least(chunk + CHUNK, strip.count);
        for (int64_t k = chunk; k < end; ++k) {
            I needed = {};
            EACH(n, VECTORS) {
                const F x = load(scores + k * GROUP + n * LANES);
                F weight, left;
                if constexpr (KIND == ENTMAX) {
                    const F from = (x - high[n]) * unit, y = from - low[n];
                    weight = raised(y, inverse);
                    needed |= LEAVE ? weight > F{} : from - open[n] > all(-1.0f);
                    if (!LEAVE) slope_part[n] += pick(y > all(-1.0f), weight * reciprocal(1.0f + y), F{});
                } else {
                    const F gap = larger((x * unit - high[n]) - low[n], F{});
                    const I above = gap > F{};
                    weight = KIND == SPARSEMAX ? gap : gap * gap;
                    if (LEAVE == ROOTS) left = gap;
                    needed |= above;
                    slope_part[n] += KIND == SPARSEMAX ? pick(above, all(1.0f), F{}) : gap;
                }
                if (LEAVE != ROOTS) left = LEAVE ? weight : x;
                part[n] += weight;
                store(scores + kept * GROUP + n * LANES, left);
            }
            keys[kept] = keys[k];
            kept += any(needed);
        }
        sum.add(part), slope.add(slope_part);
    }
    strip.count = kept;
    EACH(n, VECTORS) sums[n] = sum.whole[n], slopes[n] = slope.whole[n];
}

// Newton's step for the (1 / power)-norm of what is above the threshold, which is as convex as its power, and a
// straight line where scores are alike: (S - S^(1 - power)) / slope, S the sum of the weights.
template <int64_t KIND>
REGARD_INLINE F step_of(F sum, F slope, float power) {
    const F excess = sum - 1.0f;
    if constexpr (KIND == SPARSEMAX) return excess / slope;
    if constexpr (KIND == ENTMAX15) {
        F root = sum;
        for (int lane = 0; lane < LANES; ++lane) root[lane] = __builtin_sqrtf(sum[lane]);
        return excess * root / ((root + 1.0f) * slope);
    }
    const F t = log2_above(excess) * (power * LN2);
    const F near = t - t * t * (0.5f - t * (1.0f / 6)), far = 1.0f - exp2_bounded(t * -LOG2E);
    return sum * pick(larger(t, -t) < all(0.1f), near, far) / slope;
}

// Thresholds of sparsemax and entmax 1.5, from the left.
template <int64_t KIND>
void settle(Strip &strip, const Rule &rule, Lanes &lanes) {
    F sums[VECTORS], slopes[VECTORS];
    for (int step = 0; step < MOST_STEPS; ++step) {
        pass<KIND, SCORES>(strip, rule, lanes, sums, slopes);
        I far = {};
        EACH(n, VECTORS) {
            const F excess = sums[n] - 1.0f;
            const I there = slopes[n] > F{};
            far |= there & (larger(excess, -excess) > all(ENOUGH));
            const F low = lanes.low[n] + pick(there, step_of<KIND>(sums[n], slopes[n], rule.power), F{});
            const F high = lanes.high[n] + low, back = high - lanes.high[n];
            lanes.low[n] = pick(there, (lanes.high[n] - (high - back)) + (low - back), lanes.low[n]);
            lanes.high[n] = high;
        }
        if (!any(far)) return;
    }
}

// The same for any alpha, within a bracket: beyond alpha = 2 nothing is convex. d = 1 - tau is small for alpha near 1,
// and must be known to its own precision.
template <>
void settle<ENTMAX>(Strip &strip, const Rule &rule, Lanes &lanes) {
    F sums[VECTORS], slopes[VECTORS], most_d[VECTORS];
    EACH(n, VECTORS) most_d[n] = all(1.0f);
    for (int step = 0; step < MOST_STEPS; ++step) {
        pass<ENTMAX, SCORES>(strip, rule, lanes, sums, slopes);
        I far = {};
        EACH(n, VECTORS) {
            const F d = lanes.low[n];
            const I left = sums[n] >= all(1.0f);
            F &least_d = lanes.open[n];
            least_d = pick(left, d, least_d);
            most_d[n] = pick(left, most_d[n], d);
            const F newton = d + step_of<ENTMAX>(sums[n], slopes[n], rule.power), move = newton - d;
            const I inside = (newton > least_d) & (newton < most_d[n]);
            const I moves = larger(move, -move) > 4.0f * FLT_EPSILON * d;
            far |= moves & (slopes[n] > F{});
            // Where a step of rounding's size leaves the bracket there is nothing left to gain.
            lanes.low[n] = pick(inside, newton, pick(moves, 0.5f * (least_d + most_d[n]), d));
        }
        if (!any(far)) return;
    }
}

// From the scores of a strip to its weights. known: row numbers, or null. factors: what weights are still to be
// multiplied by. row: row numbers as `tiled` has them.
template <int64_t KIND, int LEAVE>
void weights_of(Strip &strip, const Rule &rule, Lanes &lanes, const float *known, float *factors, float *row) {
    F totals[VECTORS], slopes[VECTORS], highest[VECTORS];
    const float start = KIND == ENTMAX ? 0.0f : rule.start;
    EACH(n, VECTORS) {
        // Where there is no row, or no key to see: nothing is above an infinite threshold.
        const I there = (lanes.peak[n] > all(-INF)) & (lanes.bound[n] < all(INF));
        highest[n] = lanes.peak[n] * rule.unit;
        lanes.peak[n] = pick(there, lanes.peak[n], all(INF));
        lanes.high[n] = pick(there, highest[n], all(INF));
        lanes.low[n] = all(KIND == ENTMAX ? 0.0f : -1.0f);
        lanes.open[n] = F{};
        if (known) lanes.low[n] = load(known + n * LANES) - (KIND == ENTMAX ? 0.0f : start + 2e-7f);
    }
    if (KIND != ENTMAX || !known) settle<KIND>(strip, rule, lanes);
    pass<KIND, LEAVE>(strip, rule, lanes, totals, slopes);
    EACH(n, VECTORS) {
        store(factors + n * LANES, KIND == ENTMAX ? pick(totals[n] > F{}, 1.0f / totals[n], F{}) : all(1.0f));
        const F found = KIND == ENTMAX ? lanes.low[n] : (lanes.high[n] - highest[n]) + lanes.low[n] + start;
        store(row + n * LANES, pick(lanes.peak[n] < all(INF), found, F{}));
    }
}

struct ThresholdRoom {
    float *query, *lifted, *output, *tile, *keys, *keys_lifted, *values, *pack;
    uint32_t *bits;
    Strip strips[GROUPS];

    ThresholdRoom(const Arguments &a, int64_t height, Arena &arena) {
        query = arena.take(height * a.D), lifted = arena.take(height * a.D), output = arena.take(GROUP * a.Dv);
        tile = arena.take(KEYS * GROUP), keys = arena.take(KEYS * a.D), keys_lifted = arena.take(KEYS * a.D);
        values = arena.take(KEYS * a.Dv);
        pack = arena.take(BLOCK * most(a.D, a.Dv));
        bits = reinterpret_cast<uint32_t *>(arena.take(KEYS));
        for (int g = 0; g * GROUP < height; ++g) {
            strips[g].scores = arena.take((a.Tk + KEYS) * GROUP);
            strips[g].keys = reinterpret_cast<int32_t *>(arena.take(a.Tk + KEYS));
        }
    }
};

// Rows that a strip has kept: in place where they follow one another, else side by side in `room`.
inline Floats kept_rows(const Rows4 &x, int64_t kind, int64_t b, int64_t h, const int32_t *keys, int64_t count,
                        int64_t width, float *room) {
    if (keys[count - 1] - keys[0] == count - 1) return rows_of(x, kind, b, h, keys[0], count, width, room);
    for (int64_t n = 0; n < count; ++n) widen(x.data, kind, x.place(b, h, keys[n]), width, room + n * width);
    return {room, width};
}

// Scores of all that a block may see, sifted into the strips of its groups.
template <int SCORE>
void fill_strips(const Block &block, ThresholdRoom &room, Lanes *lanes) {
    block.seen.each_tile(KEYS, [&](int64_t k, int64_t stop) {
        const Keys keys = open_keys<SCORE>(block, k, stop - k, room.keys, room.keys_lifted);
        for (int g = 0; g * GROUP < block.rows; ++g) {
            const Span span = block.seen.span(g, k, stop);
            if (span.first >= span.last) continue;
            if (scores_of<SCORE>(block, g, span, keys, k, room.bits, room.tile, GROUP, nullptr))
                sift(room.tile, span.first, span.last - span.first, room.strips[g], lanes[g]);
        }
    });
}

inline void drop_strip(const Block &block, int g, const Strip &strip) {
    const uint32_t *seeds = block.seeds + g * GROUP;
    change(strip.scores, strip.count, GROUP,
           [&](F x, int64_t k, int n) { return x * kept(block.a, seeds + n * LANES, strip.keys[k]); });
}

// Outputs of a group from the weights of its strip. Returns whether all is finite.
inline bool mix_strip(const Block &block, int g, const Strip &strip, const float *factors, const ThresholdRoom &room) {
    const Arguments &a = block.a;
    std::memset(room.output, 0, GROUP * a.Dv * sizeof(float));
    for (int64_t k = 0; k < strip.count; k += KEYS) {
        const int64_t count = least(KEYS, strip.count - k);
        const Floats values = kept_rows(a.value, a.kind, block.b, block.hkv, strip.keys + k, count, a.Dv, room.values);
        product<false, true>(a.Dv, count, values.data, values.stride, strip.scores + k * GROUP, GROUP, room.output,
                             GROUP);
    }
    const int64_t row = (block.b * a.H + block.h) * a.Tq + block.first + g * GROUP;
    return lanes_to_rows(room.output, factors, block.rows - g * GROUP, a.Dv, a.output, a.kind, row * a.Dv, a.Dv,
                         room.pack);
}

template <int SCORE>
bool threshold_block(const Arguments &a, int64_t b, int64_t h, int64_t first, int64_t rows, ThresholdRoom &room) {
    Block block{a, b, h, h / (a.H / a.Hkv), first, rows, 1, room.query, room.lifted, false, {}, {}};
    const Rule rule(a, b, h);
    bool finite = open_block<SCORE>(block, room.pack) && rule.finite();
    Lanes lanes[GROUPS];
    for (int g = 0; g * GROUP < rows; ++g) {
        lanes[g].start(rule, rows - g * GROUP, nullptr);
        room.strips[g].count = 0;
    }
    fill_strips<SCORE>(block, room, lanes);
    for (int g = 0; g * GROUP < rows; ++g) {
        alignas(64) float factors[GROUP], tau[GROUP];
        finite = finite && !any(lanes[g].odd);
        Strip &strip = room.strips[g];
        if (rule.kind == SPARSEMAX) weights_of<SPARSEMAX, WEIGHTS>(strip, rule, lanes[g], nullptr, factors, tau);
        else if (rule.kind == ENTMAX15) weights_of<ENTMAX15, WEIGHTS>(strip, rule, lanes[g], nullptr, factors, tau);
        else weights_of<ENTMAX, WEIGHTS>(strip, rule, lanes[g], nullptr, factors, tau);
        if (a.dropped) drop_strip(block, g, strip);
        finite = mix_strip(block, g, strip, factors, room) && finite;
        const int64_t row = (b * a.H + h) * a.Tq + first + g * GROUP;
        if (a.rows) std::memcpy(a.rows + row, tau, least(GROUP, rows - g * GROUP) * sizeof(float));
    }
    return finite;
}

// Rows of a block: fewer where strips would outgrow the caches.
inline int64_t threshold_height(const Arguments &a) {
    const int64_t most_floats = 1 << 19;
    int64_t height = height_of(a);
    while (height > GROUP && height * a.Tk > most_floats) height /= 2;
    return height;
}

template <int SCORE>
int32_t threshold_forward(const Arguments &a) {
    if (!finite_keys(a)) return REGARD_NOT_FINITE;
    const int64_t height = threshold_height(a), blocks = (a.Tq + height - 1) / height, heads = a.B * a.H;
    return on_threads(a.threads, heads * blocks, floats_of<ThresholdRoom>(a, height), [&](int64_t n) {
        const int64_t first = (blocks - 1 - n / heads) * height, head = n % heads, rows = least(height, a.Tq - first);
        ThresholdRoom room(a, height, arena());
        return threshold_block<SCORE>(a, head / a.H, head % a.H, first, rows, room) ? REGARD_OK : REGARD_NOT_FINITE;
    });
}
}  // namespace
