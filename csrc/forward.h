// Forward, for normalisers that need no look at a whole row: softmax (running maximum) and weights key by key.
//     scores = score(query, key)  ->  weights = normalize(scores)  ->  output = sum of weights times values
#pragma once
#include "scores.h"

namespace {
// What a group has summed up while tiles pass: outputs [column][lane], and under softmax maximum and total a lane.
// moment, where it is wanted: the sum of weight times (score - maximum).
struct Sums {
    float *output, *peak, *total, *moment;
};

// e^(score - running maximum); what was summed before is scaled to the new maximum.
template <bool MOMENT>
void weigh_softmax(float *tile, int64_t keys, const Sums &sums, int64_t Dv) {
    F top[VECTORS], peak[VECTORS], total[VECTORS], part[VECTORS] = {}, moment[VECTORS] = {};
    EACH(n, VECTORS) top[n] = load(sums.peak + n * LANES);
    for (int64_t k = 0; k < keys; ++k)
        EACH(n, VECTORS) top[n] = larger(load(tile + k * GROUP + n * LANES), top[n]);
    EACH(n, VECTORS) {
        const F before = load(sums.peak + n * LANES);
        peak[n] = pick(top[n] == all(-INF), F{}, top[n]);
        total[n] = load(sums.total + n * LANES);
        if constexpr (MOMENT) moment[n] = load(sums.moment + n * LANES);
        if (!any(top[n] != before)) continue;
        const F factor = exp(before - peak[n]);
        if constexpr (MOMENT) moment[n] = (moment[n] + total[n] * larger(all(-127.0f), before - peak[n])) * factor;
        total[n] *= factor;
        for (int64_t c = 0; c < Dv; ++c) {
            float *at = sums.output + c * GROUP + n * LANES;
            store(at, load(at) * factor);
        }
        store(sums.peak + n * LANES, top[n]);
    }
    F few[VECTORS] = {};
    for (int64_t k = 0; k < keys; ++k) {
        if (k % 16 == 0)  // sums of sums: what the total lacks, every weight of the row has too much
            EACH(n, VECTORS) part[n] += few[n], few[n] = F{};
        EACH(n, VECTORS) {
            float *at = tile + k * GROUP + n * LANES;
            const F below = load(at) - peak[n], weight = exp(below);
            store(at, weight);
            few[n] += weight;
            if constexpr (MOMENT) moment[n] += weight * larger(all(-127.0f), below);
        }
    }
    EACH(n, VECTORS) {
        store(sums.total + n * LANES, total[n] + (part[n] + few[n]));
        if constexpr (MOMENT) store(sums.moment + n * LANES, moment[n]);
    }
}

REGARD_INLINE F sigmoid(F score, float shift) {
    const F weight = 1.0f / (exp2_bounded((score + shift) * -LOG2E) + 1.0f);
    return pick(score == all(-INF), F{}, weight);
}

inline void weigh_each(const Block &block, float *tile, int64_t keys, int64_t ld) {
    const Arguments &a = block.a;
    const float shift = a.normalize == SIGMOID ? *a.shift.at(block.b, block.h) : 0.0f;
    const auto weight = [&](F x, int64_t, int) { return a.normalize == SIGMOID ? sigmoid(x, shift) : larger(F{}, x); };
    change(tile, keys, ld, weight);
}

// What dropout leaves of a tile; `to` may be the tile itself.
inline void drop(const Block &block, int g, Span span, const float *tile, float *to) {
    for (int64_t k = span.first; k < span.last; ++k, tile += GROUP, to += GROUP)
        EACH(n, VECTORS)
            store(to + n * LANES, load(tile + n * LANES) * kept(block.a, block.seeds + g * GROUP + n * LANES, k));
}

struct ForwardRoom {
    float *query, *lifted, *output, *peak, *total, *tile, *keys, *values, *keys_lifted, *pack;
    uint32_t *bits;

    ForwardRoom(const Arguments &a, Arena &arena) {
        query = arena.take(BLOCK * a.D), lifted = arena.take(BLOCK * a.D), output = arena.take(BLOCK * a.Dv);
        peak = arena.take(BLOCK), total = arena.take(BLOCK), tile = arena.take(KEYS * GROUP);
        keys = arena.take(KEYS * a.D), keys_lifted = arena.take(KEYS * a.D), values = arena.take(KEYS * a.Dv);
        pack = arena.take(BLOCK * most(a.D, a.Dv));
        bits = reinterpret_cast<uint32_t *>(arena.take(KEYS));
    }
};

// Nobody looks at the weights; observe.h has the one who does.
struct Unwatched {
    void open_tile(int64_t, int64_t) {}
    float *tile(int, Span, const ForwardRoom &room) { return room.tile; }
    void nothing(int, Span) {}
    float *moment(int) { return nullptr; }
    void scores(int, Span, const float *) {}
    void weights(int, Span, const float *) {}
    void close(const Block &, const float *) {}
};

template <int SCORE, class Watch>
void forward_tile(const Block &block, int g, Span span, const Keys &keys, int64_t first, const Floats &values,
                  const ForwardRoom &room, Watch &watch) {
    const Arguments &a = block.a;
    const int64_t count = span.last - span.first;
    const Sums sums{room.output + g * a.Dv * GROUP, room.peak + g * GROUP, room.total + g * GROUP, watch.moment(g)};
    float *tile = watch.tile(g, span, room);
    if (!scores_of<SCORE>(block, g, span, keys, first, room.bits, tile, GROUP, nullptr)) return watch.nothing(g, span);
    if (a.normalize == SOFTMAX) watch.scores(g, span, tile);
    if (a.normalize != SOFTMAX) weigh_each(block, tile, count, GROUP);
    else if (sums.moment) weigh_softmax<true>(tile, count, sums, a.Dv);
    else weigh_softmax<false>(tile, count, sums, a.Dv);
    watch.weights(g, span, tile);
    if (a.dropped) drop(block, g, span, tile, room.tile);
    product<false, true>(a.Dv, count, values.row(span.first - first), values.stride, a.dropped ? room.tile : tile,
                         GROUP, sums.output, GROUP);
}

// Divides by the totals (a sink takes its share), writes outputs and row numbers. Returns whether all is finite.
template <class Watch>
bool close_block(const Block &block, const ForwardRoom &room, Watch &watch) {
    const Arguments &a = block.a;
    const float sink = a.sink.data ? *a.sink.at(block.b, block.h) : -INF;
    const int64_t row = (block.b * a.H + block.h) * a.Tq + block.first, rows = a.B * a.H * a.Tq;
    alignas(64) float factors[BLOCK];
    for (int64_t lane = 0; lane < BLOCK; ++lane) factors[lane] = 1.0f;
    if (a.normalize == SOFTMAX)
        for (int64_t lane = 0; lane < block.rows; ++lane) {
            float peak = room.peak[lane], total = room.total[lane], own = 1.0f;
            const bool empty = peak == -INF;
            if (a.sink.data && !empty) {
                const float top = sink > peak ? sink : peak;
                own = ::expf(peak - top);
                total = total * own + ::expf(sink - top);
                peak = top;
            }
            factors[lane] = empty ? 0.0f : own / total;
            if (a.rows) a.rows[row + lane] = empty ? 0.0f : peak, a.rows[rows + row + lane] = empty ? 0.0f : total;
            if (a.lse) a.lse[row + lane] = empty ? -INF : peak + ::logf(total);
        }
    watch.close(block, factors);
    if (a.carried)
        for (int64_t c = 0; c < a.Dv; ++c)
            for (int64_t lane = 0; lane < block.rows; ++lane)
                a.rows[(2 + c) * rows + row + lane] =
                    factors[lane] * room.output[(lane / GROUP * a.Dv + c) * GROUP + lane % GROUP];
    bool finite = true;
    for (int g = 0; g * GROUP < block.rows; ++g)
        finite &= lanes_to_rows(room.output + g * a.Dv * GROUP, factors + g * GROUP, block.rows - g * GROUP, a.Dv,
                                a.output, a.kind, (row + g * GROUP) * a.Dv, a.Dv, room.pack);
    return finite;
}

// Keys of a tile.
inline int64_t tile_keys(const Arguments &a) { return a.D + a.Dv > 256 ? KEYS / 2 : KEYS; }

template <int SCORE, class Watch>
bool forward_block(const Arguments &a, int64_t b, int64_t h, int64_t first, int64_t rows, const ForwardRoom &room,
                   Watch &watch) {
    Block block{a, b, h, h / (a.H / a.Hkv), first, rows, 1, room.query, room.lifted, false, {}, {}};
    const bool finite = open_block<SCORE>(block, room.pack);
    std::memset(room.output, 0, BLOCK * a.Dv * sizeof(float));
    for (int lane = 0; lane < BLOCK; ++lane) room.peak[lane] = -INF, room.total[lane] = 0.0f;
    block.seen.each_tile(tile_keys(a), [&](int64_t k, int64_t stop) {
        watch.open_tile(k, stop);
        const Keys keys = open_keys<SCORE>(block, k, stop - k, room.keys, room.keys_lifted);
        const Floats values = rows_of(a.value, a.kind, b, block.hkv, k, stop - k, a.Dv, room.values);
        for (int g = 0; g * GROUP < block.rows; ++g) {
            const Span span = block.seen.span(g, k, stop);
            if (span.first < span.last) forward_tile<SCORE>(block, g, span, keys, k, values, room, watch);
        }
    });
    return close_block(block, room, watch) && finite;
}

// A key that is not finite may hide behind a weight of 0 or 1: such calls are for a kernel that looks.
inline bool finite_keys(const Arguments &a) {
    const int64_t step = 512, parts = (a.Tk + step - 1) / step, work = a.B * a.Hkv * parts;
    return REGARD_OK == on_threads(work * a.D > 1024 ? a.threads : 1, work, 0, [&](int64_t n) {
        const int64_t at = n % parts * step, head = n / parts, count = least(step, a.Tk - at);
        return finite_rows(a.key, a.kind, head / a.Hkv, head % a.Hkv, at, count, a.D) ? REGARD_OK : REGARD_NOT_FINITE;
    });
}

// Rows of a block: many where there is work for every thread all the same.
inline int64_t height_of(const Arguments &a) {
    int64_t height = BLOCK;
    while (height > GROUP && a.B * a.H * ((a.Tq + height - 1) / height) < 2 * a.threads) height /= 2;
    return a.threads > 1 ? height : int64_t(BLOCK);
}

template <int SCORE>
int32_t forward(const Arguments &a) {
    if (!finite_keys(a)) return REGARD_NOT_FINITE;
    const int64_t height = height_of(a), blocks = (a.Tq + height - 1) / height, heads = a.B * a.H;
    return on_threads(a.threads, heads * blocks, floats_of<ForwardRoom>(a), [&](int64_t n) {
        // The last blocks of a causal mask are the longest: they go first.
        const int64_t first = (blocks - 1 - n / heads) * height, head = n % heads;
        const ForwardRoom room(a, arena());
        Unwatched nobody;
        const int64_t rows = least(height, a.Tq - first), b = head / a.H;
        return forward_block<SCORE>(a, b, head % a.H, first, rows, room, nobody) ? REGARD_OK : REGARD_NOT_FINITE;
    });
}
}  // namespace
