// Statistics of the weights while the forward pass makes them. A block's weights stay in a strip, each tile at the
// maximum of its time, and are swept once, when the totals of the rows are known. All of it is linear in the keys.
#pragma once
#include "forward.h"

namespace {
namespace observing {

// What is wanted, null or 0 where it is not. native_observe.py packs the same list behind the arguments of a call.
struct Wanted {
    int64_t topk, splits, tall, across, columns, chosen;  // cells of a pooled map: their rows and keys, and how many
    int64_t keys;                                         // Tk and room for a vector
    float *highest, *entropy;                             // (B, H, Tq)
    float *received;                                      // (splits, B, H, keys), zeros before
    float *pooled, *pooled_max, *edges;  // (B, H, rows, columns) twice; (2, splits, B, H, columns); zeros before
    float *top_weights;                  // (B, H, Tq, topk)
    int64_t *top_keys;
    const int64_t *chosen_rows;
    float *chosen_weights;  // (B, H, chosen, Tk), zeros before
};
struct Observed {
    Arguments call;
    Wanted wanted;
};

constexpr int64_t CHUNK = 8, CHUNKS = KEYS / CHUNK;  // of keys, whose largest scores say where top weights can be
constexpr int64_t WIDE = 4 * CHUNK;
constexpr int64_t CELLS = KEYS + LANES;               // that a tile may touch, and a vector of them

// log2 of positive numbers, absolute error 1e-7; finite for 0 and denormal ones.
REGARD_INLINE F log2_of(F x) {
    const I bits = as_int(x) - 0x3F3504F3;  // sqrt(1/2): the mantissa comes between it and twice that
    const F m = as_float((bits & 0x007FFFFF) + 0x3F3504F3), t = (m - 1.0f) / (m + 1.0f), z = t * t;
    F p = all(0.32059889f);
    p = p * z + 0.41219857f;
    p = p * z + 0.57707802f;
    p = p * z + 0.96179669f;
    p = p * z + 2.88539008f;
    return __builtin_convertvector(bits >> 23, F) + t * p;
}

// Puts a number a lane into descending lists, behind those that are as large: what came first stays first.
template <bool KEYED>
REGARD_INLINE void insert(float *list, int32_t *keys, int64_t count, F number, int32_t key) {
    I own = all(key);
    for (int64_t m = 0; m < count; ++m, list += GROUP, keys += KEYED ? GROUP : 0) {
        const F there = load(list);
        const I wins = number > there;
        store(list, pick(wins, number, there));
        number = pick(wins, there, number);
        if constexpr (KEYED) {
            I place;
            std::memcpy(&place, keys, sizeof(I));
            const I next = wins ? own : place;
            std::memcpy(keys, &next, sizeof(I));
            own = wins ? place : own;
        }
    }
}

struct Mark {  // of a tile and group: its keys, and where its weights are, [key][GROUP]
    int64_t first, last;
    float *weights;
};

struct WatchRoom {
    float *peaks, *least, *moment, *highest, *sums, *chunks, *best, *top, *cells, *strip;
    int32_t *top_keys;
    Mark *marks;

    static int64_t tiles(const Arguments &a) { return a.Tk / tile_keys(a) + 3; }
    static bool swept(const Wanted &w) { return w.topk || w.received || w.pooled || w.chosen; }
    static int64_t floats(const Arguments &a, const Wanted &w) {
        const int64_t top = w.topk ? tiles(a) * CHUNKS * BLOCK + 3 * BLOCK * w.topk : 0;
        return tiles(a) * (BLOCK + (GROUPS + 1) * 8) + 3 * BLOCK + KEYS * LANES + top + 2 * BLOCK * CELLS +
               (swept(w) ? BLOCK * a.Tk : 0) + 16 * 12;
    }
    WatchRoom(const Arguments &a, const Wanted &w, Arena &arena) {
        peaks = arena.take(tiles(a) * BLOCK);
        marks = reinterpret_cast<Mark *>(arena.take(tiles(a) * (GROUPS + 1) * 8));
        least = arena.take(BLOCK), moment = arena.take(BLOCK), highest = arena.take(BLOCK);
        sums = arena.take(KEYS * LANES);
        chunks = arena.take(w.topk ? tiles(a) * CHUNKS * BLOCK : 0);
        best = arena.take(BLOCK * w.topk), top = arena.take(BLOCK * w.topk);
        top_keys = reinterpret_cast<int32_t *>(arena.take(BLOCK * w.topk));
        cells = arena.take(2 * BLOCK * CELLS);
        strip = arena.take(swept(w) ? BLOCK * a.Tk : 0);
    }
};

// Looks at the blocks of a part of a head, one after another.
class Watch {
  public:
    // edge: the row of cells, if any, that the part before may share.
    Watch(const Arguments &a, const Wanted &w, const WatchRoom &room, int64_t head, int64_t part, int64_t edge)
        : a(a), w(w), room(room), head(head), heads(a.B * a.H), part(part), edge(edge) {}

    bool finite() const { return sum(bad) == 0.0f; }

    void open_block(int64_t first, int64_t rows) {
        groups = (rows + GROUP - 1) / GROUP;
        tiles = 0, next = room.strip;
        for (int64_t n = 0; n < BLOCK; ++n) room.moment[n] = room.highest[n] = 0.0f;
        for (int64_t n = 0; n < BLOCK * w.topk; ++n) room.best[n] = -INF, room.top[n] = 0.0f, room.top_keys[n] = -1;
        for (int64_t n = 0; w.pooled && n < rows; ++n) {
            const int64_t row = (first + n) / w.tall, height = (a.Tq + w.tall - 1) / w.tall;
            const int64_t at = row == edge ? part * heads + head : head * height + row;
            cell[n] = (row == edge ? w.edges : w.pooled) + at * w.columns;
            cell_max[n] = (row == edge ? w.edges + w.splits * heads * w.columns : w.pooled_max) + at * w.columns;
            share[n] = 1.0f / float(least(w.tall, a.Tq - row * w.tall));
        }
    }
    void open_tile(int64_t first, int64_t last) {
        mark(tiles, GROUPS) = {first, last, nullptr};
        for (int g = 0; g < groups; ++g, next += (last - first) * GROUP) mark(tiles, g) = {first, first, next};
        ++tiles;
    }
    float *tile(int g, Span span, const ForwardRoom &forward) {
        Mark &own = mark(tiles - 1, g);
        own.first = span.first, own.last = span.last;
        if (!WatchRoom::swept(w)) own.weights = forward.tile;
        return own.weights;
    }
    float *moment(int g) { return w.entropy ? room.moment + g * GROUP : nullptr; }

    // The largest score of every chunk of a tile, and of wider ones the largest so far: top weights are not below these.
    void scores(int g, Span span, const float *tile) {
        const int64_t keys = w.topk ? span.last - span.first : 0;
        float *best = room.best + g * w.topk * GROUP, *chunk = chunks(tiles - 1, g);
        for (int64_t from = 0; from < keys; from += WIDE) {
            F high[VECTORS];
            for (int n = 0; n < VECTORS; ++n) high[n] = all(-INF);
            for (int64_t k = from; k < least(from + WIDE, keys); k += CHUNK, chunk += GROUP)
                for (int n = 0; n < VECTORS; ++n) {
                    const float *at = tile + k * GROUP + n * LANES;
                    F top = load(at);
                    if (k + CHUNK <= keys) {
                        REGARD_UNROLL
                        for (int64_t j = 1; j < CHUNK; ++j) top = larger(load(at + j * GROUP), top);
                    } else {
                        for (int64_t j = 1; j < keys - k; ++j) top = larger(load(at + j * GROUP), top);
                    }
                    store(chunk + n * LANES, top);
                    high[n] = larger(top, high[n]);
                }
            for (int n = 0; n < VECTORS; ++n)
                if (any(high[n] > load(best + (w.topk - 1) * GROUP + n * LANES)))
                    insert<false>(best + n * LANES, nullptr, w.topk, high[n], 0);
        }
    }

    void weights(const Block &, int g, Span span, const float *tile, const Sums &sums) {
        std::memcpy(peaks(tiles - 1, g), sums.peak, GROUP * sizeof(float));
        if (a.normalize == SOFTMAX) return;
        scores(g, span, tile);
        if (w.highest || w.entropy) each(g, span.last - span.first, tile);
    }

    // Once the factors that make weights of a block's numbers are known: writes what was seen of it.
    void close(const Block &block, const ForwardRoom &forward, const float *row_factors) {
        alignas(64) float factors[BLOCK];
        for (int64_t n = 0; n < BLOCK; ++n) factors[n] = n < block.rows ? row_factors[n] : 0.0f;
        close_rows(block, forward, factors);
        for (int g = 0; w.topk && g < groups; ++g) open_top(g, forward, factors);
        for (int64_t n = 0; WatchRoom::swept(w) && n < tiles; ++n) sweep(block, forward, factors, n);
        if (w.topk) close_top(block);
    }

  private:
    const Arguments &a;
    const Wanted &w;
    const WatchRoom &room;
    int64_t head, heads, part, edge, groups = 0, tiles = 0;
    float *cell[BLOCK], *cell_max[BLOCK], share[BLOCK];  // of every row
    float *next = nullptr;
    F bad = {};

    Mark &mark(int64_t tile, int g) const { return room.marks[tile * (GROUPS + 1) + g]; }
    float *peaks(int64_t tile, int g) const { return room.peaks + tile * BLOCK + g * GROUP; }
    float *chunks(int64_t tile, int g) const { return room.chunks + (tile * GROUPS + g) * CHUNKS * GROUP; }

    // Largest weight and entropy where weights are what they will be.
    void each(int g, int64_t keys, const float *tile) {
        for (int n = 0; n < VECTORS; ++n) {
            float *high = room.highest + g * GROUP + n * LANES, *sum = room.moment + g * GROUP + n * LANES;
            F highest = load(high), entropy = load(sum);
            for (int64_t k = 0; k < keys; ++k) {
                const F weight = load(tile + k * GROUP + n * LANES);
                highest = larger(weight, highest);
                if (w.entropy) entropy += weight * log2_of(weight);
            }
            store(high, highest);
            store(sum, entropy);
        }
    }

    // A weight is factor * 2^below, so that -ln of it is -ln factor - below ln 2: neither term is negative.
    void close_rows(const Block &block, const ForwardRoom &forward, const float *factors) {
        const bool softmax = a.normalize == SOFTMAX;
        for (int64_t n = 0; n < block.rows; ++n) {
            const int64_t row = head * a.Tq + block.first + n;
            const float factor = factors[n], moment = room.moment[n] * LN2;
            float entropy = softmax ? 0.0f : -moment;
            if (softmax && factor > 0) entropy = factor * (forward.total[n] * -::logf(factor) - moment);
            if (w.highest) w.highest[row] = softmax ? factor : room.highest[n];
            if (w.entropy) w.entropy[row] = entropy;
            bad[0] += (factor + entropy) * 0.0f;
        }
    }

    // 2^(what was the maximum - what it came to be): what the numbers of that time are to be multiplied by.
    F since(const ForwardRoom &forward, int at, F before) const {
        if (a.normalize != SOFTMAX) return all(1.0f);
        return pick(before == all(-INF), F{}, exp2(before - load(forward.peak + at)));
    }

    // ------------------------------------------------------------------------ top weights

    // Weights up to `least` are none of the top; a little is taken off for what rounding adds.
    void open_top(int g, const ForwardRoom &forward, const float *factors) {
        for (int n = 0; n < VECTORS; ++n) {
            const int at = g * GROUP + n * LANES;
            const F score = load(room.best + ((g + 1) * w.topk - 1) * GROUP + n * LANES);
            const F weight = a.normalize == SOFTMAX ? since(forward, at, score) * load(factors + at) : score;
            store(room.least + at, larger(weight * (1 - 4e-6f), F{}));
        }
    }

    void find_top(int g, Mark own, const float *chunk, const float *factor) {
        float *list = room.top + g * w.topk * GROUP, *last = list + (w.topk - 1) * GROUP;
        const float *bound = room.best + ((g + 1) * w.topk - 1) * GROUP;
        int32_t *keys = room.top_keys + g * w.topk * GROUP;
        F factors[VECTORS], weight[VECTORS], low[VECTORS], raw[VECTORS];  // raw: about low, before the factor
        for (int n = 0; n < VECTORS; ++n) {
            factors[n] = load(factor + n * LANES), low[n] = load(room.least + g * GROUP + n * LANES);
            raw[n] = pick(factors[n] > F{}, low[n] / factors[n] * (1 - 1e-6f), all(INF));
        }
        for (int64_t from = own.first; from < own.last; from += CHUNK, chunk += GROUP) {
            I some = {};
            for (int n = 0; n < VECTORS; ++n) some |= load(chunk + n * LANES) >= load(bound + n * LANES);
            if (!any(some)) continue;
            const float *at = own.weights + (from - own.first) * GROUP;
            for (int64_t k = from; k < least(from + CHUNK, own.last); ++k, at += GROUP) {
                some = I{};
                for (int n = 0; n < VECTORS; ++n) some |= load(at + n * LANES) > raw[n];
                if (!any(some)) continue;
                some = I{};
                for (int n = 0; n < VECTORS; ++n)
                    weight[n] = load(at + n * LANES) * factors[n], some |= weight[n] > low[n];
                if (!any(some)) continue;
                for (int n = 0; n < VECTORS; ++n) {
                    insert<true>(list + n * LANES, keys + n * LANES, w.topk, weight[n], int32_t(k));
                    low[n] = larger(load(last + n * LANES), low[n]);
                }
            }
        }
        for (int n = 0; n < VECTORS; ++n) store(room.least + g * GROUP + n * LANES, low[n]);
    }

    void close_top(const Block &block) {
        for (int64_t n = 0; n < block.rows; ++n) {
            const int64_t to = (head * a.Tq + block.first + n) * w.topk, g = n / GROUP;
            for (int64_t m = 0; m < w.topk; ++m) {
                const int64_t from = (g * w.topk + m) * GROUP + n % GROUP;
                w.top_weights[to + m] = room.top[from], w.top_keys[to + m] = room.top_keys[from];
            }
        }
    }

    // ------------------------------------------------------------------------ the strip, a tile at a time

    void sweep(const Block &block, const ForwardRoom &forward, const float *factors, int64_t tile) {
        const Mark whole = mark(tile, GROUPS);
        const int64_t first_cell = whole.first / w.across, cells = (whole.last - 1) / w.across + 1 - first_cell;
        if (w.pooled) {
            std::memset(room.cells, 0, (cells + LANES) * BLOCK * sizeof(float));
            std::memset(room.cells + CELLS * BLOCK, 0, (cells + LANES) * BLOCK * sizeof(float));
        }
        if (w.received) std::memset(room.sums, 0, KEYS * LANES * sizeof(float));
        for (int g = 0; g < groups; ++g) {
            const Mark own = mark(tile, g);
            if (own.first >= own.last) continue;
            alignas(64) float factor[GROUP];
            for (int n = 0; n < VECTORS; ++n) {
                const int at = g * GROUP + n * LANES;
                store(factor + n * LANES, since(forward, at, load(peaks(tile, g) + n * LANES)) * load(factors + at));
            }
            float *sums = room.sums + (own.first - whole.first) * LANES;
            if (w.pooled) sweep_cells(own, factor, sums, room.cells - first_cell * BLOCK + g * GROUP);
            else if (w.received) add_up<true, false>(own.weights, own.last - own.first, factor, sums, nullptr);
            if (w.topk) find_top(g, own, chunks(tile, g), factor);
            if (w.chosen) copy_rows(block, g, own, factor);
        }
        if (w.received) close_sums(whole);
        if (w.pooled) close_cells(block.rows, first_cell, cells);
    }

    // Cell by cell of a row of them.
    void sweep_cells(Mark own, const float *factor, float *sums, float *to) {
        int64_t stop = (own.first / w.across + 1) * w.across;
        to += own.first / w.across * BLOCK;
        for (int64_t k = own.first; k < own.last; k = stop, stop += w.across, to += BLOCK) {
            stop = least(stop, own.last);
            const float *weights = own.weights + (k - own.first) * GROUP;
            if (w.received) add_up<true, true>(weights, stop - k, factor, sums + (k - own.first) * LANES, to);
            else add_up<false, true>(weights, stop - k, factor, nullptr, to);
        }
    }

    // Weights of some keys: over the lanes into sums a key, over the keys into sums and maxima a lane.
    template <bool RECEIVED, bool POOLED>
    static void add_up(const float *weights, int64_t keys, const float *factor, float *sums, float *to) {
        F factors[VECTORS], total[VECTORS] = {}, high[VECTORS] = {};
        for (int n = 0; n < VECTORS; ++n) factors[n] = load(factor + n * LANES);
        for (int64_t k = 0; k < keys; ++k, weights += GROUP) {
            F received = RECEIVED ? load(sums + k * LANES) : F{};
            REGARD_UNROLL
            for (int n = 0; n < VECTORS; ++n) {
                const F weight = load(weights + n * LANES);
                if constexpr (RECEIVED) received += weight * factors[n];
                if constexpr (POOLED) total[n] += weight, high[n] = larger(weight, high[n]);
            }
            if constexpr (RECEIVED) store(sums + k * LANES, received);
        }
        for (int n = 0; POOLED && n < VECTORS; ++n) {
            store(to + n * LANES, total[n] * factors[n]);
            store(to + CELLS * BLOCK + n * LANES, high[n] * factors[n]);
        }
    }

    // Sums a key and lane become what the keys received.
    void close_sums(Mark tile) {
        float *to = w.received + (part * heads + head) * w.keys + tile.first;
        for (int64_t k = 0; k < tile.last - tile.first; k += LANES) {
            F x[LANES], total = {};
            REGARD_UNROLL
            for (int n = 0; n < LANES; ++n) x[n] = load(room.sums + (k + n) * LANES);
            transpose(x);
            REGARD_UNROLL
            for (int n = 0; n < LANES; ++n) total += x[n];
            store(to + k, load(to + k) + total);
            bad += total * 0.0f;
        }
    }

    void copy_rows(const Block &block, int g, Mark own, const float *factor) {
        for (int64_t n = 0; n < w.chosen; ++n) {
            const int64_t lane = w.chosen_rows[n] - block.first - g * GROUP;
            if (lane < 0 || lane >= least(GROUP, block.rows - g * GROUP)) continue;
            float *to = w.chosen_weights + (head * w.chosen + n) * a.Tk;
            for (int64_t k = own.first; k < own.last; ++k)
                to[k] = own.weights[(k - own.first) * GROUP + lane] * factor[lane];
        }
    }

    // A tile's cells: lanes are turned to rows, and rows of one cell are added up.
    void close_cells(int64_t rows, int64_t first, int64_t cells) {
        for (int64_t top = 0; top < rows; top += LANES)
            for (int64_t c = 0; c < cells; c += LANES) {
                F sums[LANES], highs[LANES];
                REGARD_UNROLL
                for (int n = 0; n < LANES; ++n) {
                    sums[n] = load(room.cells + (c + n) * BLOCK + top);
                    highs[n] = load(room.cells + (CELLS + c + n) * BLOCK + top);
                }
                transpose(sums);
                transpose(highs);
                F total = {}, high = {};
                for (int64_t n = top; n < least(top + LANES, rows); ++n) {
                    total += sums[n - top], high = larger(highs[n - top], high);
                    if (n + 1 < least(top + LANES, rows) && cell[n + 1] == cell[n]) continue;
                    add_cells(cell[n] + first + c, cell_max[n] + first + c, total * share[n], high, cells - c);
                    total = high = F{};
                }
            }
    }
    static void add_cells(float *to, float *to_max, F total, F high, int64_t cells) {
        if (cells >= LANES) return store(to, load(to) + total), store(to_max, larger(high, load(to_max)));
        for (int64_t n = 0; n < cells; ++n) to[n] += total[n], to_max[n] = to_max[n] < high[n] ? high[n] : to_max[n];
    }
};

// Adds what the parts of a head left at their edges, part after part.
inline void join_edges(const Arguments &a, const Wanted &w, int64_t height, int64_t blocks) {
    const int64_t heads = a.B * a.H, rows = (a.Tq + w.tall - 1) / w.tall;
    for (int64_t n = 0; n < w.splits * heads; ++n) {
        const int64_t row = n / heads * blocks / w.splits * height / w.tall, at = (n % heads * rows + row) * w.columns;
        const float *sum = w.edges + n * w.columns, *high = sum + w.splits * heads * w.columns;
        for (int64_t c = 0; c < w.columns; ++c) {
            w.pooled[at + c] += sum[c];
            if (w.pooled_max[at + c] < high[c]) w.pooled_max[at + c] = high[c];
        }
    }
}

// A part of a head's blocks, one after another.
template <int SCORE>
bool observe_part(const Arguments &a, const Wanted &w, int64_t head, int64_t part, int64_t height, Arena &own) {
    const int64_t blocks = (a.Tq + height - 1) / height, from = part * blocks / w.splits;
    const ForwardRoom room(a, own);
    const WatchRoom watch_room(a, w, own);
    Watch watch(a, w, watch_room, head, part, w.edges ? from * height / w.tall : -1);
    bool finite = true;
    for (int64_t n = from; n < (part + 1) * blocks / w.splits; ++n) {
        const int64_t rows = least(height, a.Tq - n * height);
        watch.open_block(n * height, rows);
        finite &= forward_block<SCORE>(a, head / a.H, head % a.H, n * height, rows, room, watch);
    }
    return finite && watch.finite();
}

template <int SCORE>
int32_t observe(const Observed &call) {
    const Arguments &a = call.call;
    const Wanted &w = call.wanted;
    if (!finite_keys(a)) return REGARD_NOT_FINITE;
    const int64_t height = height_of(a), heads = a.B * a.H, work = heads * w.splits;
    int32_t status = REGARD_OK;
    const auto run = [&](int64_t n) {
        Arena &own = arena();
        if (!own.start(ForwardRoom::floats(a) + WatchRoom::floats(a, w)))
            __atomic_store_n(&status, REGARD_NO_MEMORY, __ATOMIC_RELAXED);
        // The last rows of a causal mask are the longest: they go first.
        else if (!observe_part<SCORE>(a, w, n % heads, w.splits - 1 - n / heads, height, own))
            __atomic_store_n(&status, REGARD_NOT_FINITE, __ATOMIC_RELAXED);
    };
    if (a.threads <= 1 || work <= 1) {
        for (int64_t n = 0; n < work; ++n) run(n);
        arena().end();
    } else {
#pragma omp parallel num_threads(int(least(a.threads, work)))
        {
#pragma omp for schedule(dynamic, 1)
            for (int64_t n = 0; n < work; ++n) run(n);
            arena().end();
        }
    }
    if (w.edges) join_edges(a, w, height, (a.Tq + height - 1) / height);
    return status;
}

}  // namespace observing
}  // namespace
