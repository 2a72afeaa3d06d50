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
    float *maps;  // means, then maxima, zeros before: (B, H, rows, columns), and with several parts to a head
                  // (splits, B, H, columns) for the first row of cells of each, which the part before may share
    int64_t *starts;     // the number of that row
    float *top_weights;  // (B, H, Tq, topk)
    int64_t *top_keys;
    const int64_t *chosen_rows;
    float *chosen_weights;  // (B, H, chosen, Tk), zeros before
};
struct Observed { Arguments call; Wanted wanted; };
static_assert(sizeof(Wanted) == 16 * 8, "native_observe.py packs 16 integers");

constexpr int64_t CHUNK = 8, CHUNKS = KEYS / CHUNK;  // of keys, whose largest scores say where top weights can be
constexpr int64_t CELLS = KEYS + LANES;              // that a tile may touch, and a vector of them

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

// Of a tile and group: its keys, and where its weights are, [key][GROUP].
struct Mark { int64_t first, last; float *weights; };

// Looks at the blocks of a part of a head, one after another.
class Watch {
  public:
    const ForwardRoom forward;

    Watch(const Arguments &a, const Wanted &w, int64_t head, int64_t part, int64_t first, Arena &arena)
        : forward(a, arena), a(a), w(w), head(head), part(part), edge(w.splits > 1 ? first / w.tall : -1) {
        tile_peaks = arena.take(tiles_of(a) * BLOCK);
        marks = reinterpret_cast<Mark *>(arena.take(tiles_of(a) * (GROUPS + 1) * 8));
        low = arena.take(BLOCK), moments = arena.take(BLOCK), highest = arena.take(BLOCK);
        received = arena.take(KEYS * LANES);
        highs = arena.take(w.topk ? tiles_of(a) * CHUNKS * BLOCK : 0);
        best = arena.take(BLOCK * w.topk), top = arena.take(BLOCK * w.topk);
        top_keys = reinterpret_cast<int32_t *>(arena.take(BLOCK * w.topk));
        cells = arena.take(2 * BLOCK * CELLS);
        strip = arena.take(swept(w) ? BLOCK * a.Tk : 0);
    }

    bool finite() const { return sum(bad) == 0.0f; }
    float *moment(int g) { return w.entropy ? moments + g * GROUP : nullptr; }

    void open_block(int64_t first, int64_t rows) {
        groups = (rows + GROUP - 1) / GROUP;
        tiles = 0, next = strip;
        for (int64_t n = 0; n < BLOCK; ++n) moments[n] = highest[n] = 0.0f;
        for (int64_t n = 0; n < BLOCK * w.topk; ++n) best[n] = -INF, top[n] = 0.0f, top_keys[n] = -1;
        for (int64_t n = 0; w.maps && n < rows; ++n) {
            const int64_t row = (first + n) / w.tall;
            cell[n] = w.maps + (row == edge ? heads * height + part * heads + head : head * height + row) * w.columns;
            share[n] = 1.0f / float(least(w.tall, a.Tq - row * w.tall));
        }
    }
    void open_tile(int64_t first, int64_t last) {
        mark(tiles, GROUPS) = {first, last, nullptr};
        for (int g = 0; g < groups; ++g, next += (last - first) * GROUP) mark(tiles, g) = {first, first, next};
        ++tiles;
    }
    float *tile(int g, Span span, const ForwardRoom &) {
        Mark &own = mark(tiles - 1, g);
        own = {span.first, span.last, swept(w) ? own.weights : forward.tile};
        return own.weights;
    }
    void nothing(int g, Span span) { mark(tiles - 1, g).last = span.first; }

    // The largest score of every chunk of a tile, and of four chunks the largest so far: no top weight is below these.
    void scores(int g, Span span, const float *tile) {
        const int64_t keys = w.topk ? span.last - span.first : 0;
        float *list = best + g * w.topk * GROUP, *to = chunks(tiles - 1, g);
        for (int64_t from = 0; from < keys; from += 4 * CHUNK)
            EACH(n, VECTORS) {
                F high = all(-INF);
                for (int64_t k = from, c = from / CHUNK; k < least(from + 4 * CHUNK, keys); k += CHUNK, ++c) {
                    F most = all(-INF);
                    REGARD_UNROLL
                    for (int64_t j = 0; j < CHUNK; ++j)
                        if (k + j < keys) most = larger(load(tile + (k + j) * GROUP + n * LANES), most);
                    store(to + c * GROUP + n * LANES, most);
                    high = larger(most, high);
                }
                if (any(high > load(list + (w.topk - 1) * GROUP + n * LANES)))
                    insert<false>(list + n * LANES, nullptr, w.topk, high, 0);
            }
    }

    void weights(int g, Span span, const float *tile) {
        std::memcpy(peaks(tiles - 1, g), forward.peak + g * GROUP, GROUP * sizeof(float));
        if (a.normalize == SOFTMAX) return;
        scores(g, span, tile);
        for (int n = 0; (w.highest || w.entropy) && n < VECTORS; ++n) {
            const int at = g * GROUP + n * LANES;
            F high = load(highest + at), entropy = load(moments + at);
            for (int64_t k = 0; k < span.last - span.first; ++k) {
                const F weight = load(tile + k * GROUP + n * LANES);
                high = larger(weight, high);
                if (w.entropy) entropy += weight * log2_of(weight, F{});
            }
            store(highest + at, high), store(moments + at, entropy);
        }
    }

    // Once the factors that make weights of a block's numbers are known: writes what was seen of it.
    void close(const Block &block, const float *row_factors) {
        for (int64_t n = 0; n < BLOCK; ++n) factors[n] = n < block.rows ? row_factors[n] : 0.0f;
        for (int64_t n = 0; n < block.rows; ++n) {
            // A weight is factor * e^below, so that -ln of it is -ln factor - below: neither term is negative.
            const int64_t row = head * a.Tq + block.first + n;
            const bool softmax = a.normalize == SOFTMAX;
            float entropy = softmax ? 0.0f : -LN2 * moments[n];
            if (softmax && factors[n] > 0)
                entropy = -factors[n] * (forward.total[n] * ::logf(factors[n]) + moments[n]);
            if (w.highest) w.highest[row] = softmax ? factors[n] : highest[n];
            if (w.entropy) w.entropy[row] = entropy;
            bad[0] += (factors[n] + entropy) * 0.0f;
        }
        for (int at = 0; w.topk && at < groups * GROUP; at += LANES) {  // a little is taken off for what rounding adds
            const F bound = load(bounds(at / GROUP) + at % GROUP);
            store(low + at, larger((a.normalize == SOFTMAX ? factor(at, bound) : bound) * (1 - 4e-6f), F{}));
        }
        for (int64_t n = 0; swept(w) && n < tiles; ++n) sweep(block, n);
        for (int64_t n = 0; n < block.rows; ++n)
            for (int64_t m = 0; m < w.topk; ++m) {
                const int64_t to = (head * a.Tq + block.first + n) * w.topk + m;
                const int64_t from = (n / GROUP * w.topk + m) * GROUP + n % GROUP;
                w.top_weights[to] = top[from], w.top_keys[to] = top_keys[from];
            }
    }

  private:
    const Arguments &a;
    const Wanted &w;
    int64_t head, part, edge, heads = a.B * a.H, height = (a.Tq + w.tall - 1) / w.tall, groups = 0, tiles = 0;
    float *tile_peaks, *low, *moments, *highest, *received, *highs, *best, *top, *cells, *strip, *next;
    int32_t *top_keys;
    Mark *marks;
    float *cell[BLOCK], share[BLOCK];  // of every row
    alignas(64) float factors[BLOCK];
    F bad = {};

    static int64_t tiles_of(const Arguments &a) { return a.Tk / tile_keys(a) + 3; }
    static bool swept(const Wanted &w) { return w.topk || w.received || w.maps || w.chosen; }
    Mark &mark(int64_t tile, int g) const { return marks[tile * (GROUPS + 1) + g]; }
    float *peaks(int64_t tile, int g) const { return tile_peaks + tile * BLOCK + g * GROUP; }
    float *chunks(int64_t tile, int g) const { return highs + (tile * GROUPS + g) * CHUNKS * GROUP; }
    float *bounds(int g) const { return best + ((g + 1) * w.topk - 1) * GROUP; }

    // What makes weights of numbers that were taken when the maximum was `before`.
    F factor(int at, F before) const {
        if (a.normalize != SOFTMAX) return load(factors + at);
        return pick(before == all(-INF), F{}, exp(before - load(forward.peak + at)) * load(factors + at));
    }

    // Chunks that reach the bound are searched; weights up to `least` are none of the top.
    void find_top(int g, Mark own, const float *chunk, const F (&factors)[VECTORS]) {
        float *list = top + g * w.topk * GROUP, *last = list + (w.topk - 1) * GROUP;
        int32_t *keys = top_keys + g * w.topk * GROUP;
        F weight[VECTORS], bound[VECTORS], least[VECTORS], raw[VECTORS];  // raw: about least, before the factor
        EACH(n, VECTORS) {
            bound[n] = load(bounds(g) + n * LANES);
            least[n] = load(low + g * GROUP + n * LANES);
            raw[n] = pick(factors[n] > F{}, least[n] / factors[n] * (1 - 1e-6f), all(INF));
        }
        for (int64_t from = own.first; from < own.last; from += CHUNK, chunk += GROUP) {
            I some = {};
            EACH(n, VECTORS) some |= load(chunk + n * LANES) >= bound[n];
            const float *at = own.weights + (from - own.first) * GROUP;
            for (int64_t k = from; any(some) && k < from + CHUNK && k < own.last; ++k, at += GROUP) {
                I wins = {};
                EACH(n, VECTORS) wins |= load(at + n * LANES) > raw[n];
                if (!any(wins)) continue;
                wins = I{};
                EACH(n, VECTORS) weight[n] = load(at + n * LANES) * factors[n], wins |= weight[n] > least[n];
                for (int n = 0; any(wins) && n < VECTORS; ++n) {
                    insert<true>(list + n * LANES, keys + n * LANES, w.topk, weight[n], int32_t(k));
                    least[n] = larger(load(last + n * LANES), least[n]);
                }
            }
        }
        EACH(n, VECTORS) store(low + g * GROUP + n * LANES, least[n]);
    }

    void sweep(const Block &block, int64_t tile) {
        const Mark whole = mark(tile, GROUPS);
        const int64_t first_cell = whole.first / w.across, count = (whole.last - 1) / w.across + 1 - first_cell;
        for (int half = 0; w.maps && half < 2; ++half)
            std::memset(cells + half * CELLS * BLOCK, 0, (count + LANES) * BLOCK * sizeof(float));
        if (w.received) std::memset(received, 0, KEYS * LANES * sizeof(float));
        for (int g = 0; g < groups; ++g) {
            const Mark own = mark(tile, g);
            if (own.first >= own.last) continue;
            F factors[VECTORS];
            EACH(n, VECTORS) factors[n] = factor(g * GROUP + n * LANES, load(peaks(tile, g) + n * LANES));
            const int64_t across = w.maps ? w.across : a.Tk;
            float *to = cells + (own.first / across - (w.maps ? first_cell : 0)) * BLOCK + g * GROUP;
            for (int64_t k = own.first, stop; k < own.last; k = stop, to += BLOCK) {
                stop = least(own.last, k + across - k % across);
                const float *weights = own.weights + (k - own.first) * GROUP;
                float *sums = received + (k - whole.first) * LANES;
                if (w.received && w.maps) add_up<true, true>(weights, stop - k, factors, sums, to);
                else if (w.received) add_up<true, false>(weights, stop - k, factors, sums, to);
                else if (w.maps) add_up<false, true>(weights, stop - k, factors, sums, to);
            }
            if (w.topk) find_top(g, own, chunks(tile, g), factors);
            if (w.chosen) copy_rows(block, g, own, factors);
        }
        if (w.received) close_received(whole);
        if (w.maps) close_cells(block.rows, first_cell, count);
    }

    // Weights of some keys: over the lanes into sums a key, over the keys into sums and maxima a lane.
    template <bool RECEIVED, bool POOLED>
    static void add_up(const float *weights, int64_t keys, const F (&factor)[VECTORS], float *sums, float *to) {
        F total[VECTORS] = {}, high[VECTORS] = {};
        for (int64_t k = 0; k < keys; ++k, weights += GROUP) {
            F some = RECEIVED ? load(sums + k * LANES) : F{};
            EACH(n, VECTORS) {
                const F weight = load(weights + n * LANES);
                if constexpr (RECEIVED) some += weight * factor[n];
                if constexpr (POOLED) total[n] += weight, high[n] = larger(weight, high[n]);
            }
            if constexpr (RECEIVED) store(sums + k * LANES, some);
        }
        for (int n = 0; POOLED && n < VECTORS; ++n) {
            store(to + n * LANES, total[n] * factor[n]);
            store(to + CELLS * BLOCK + n * LANES, high[n] * factor[n]);
        }
    }

    // Sums a key and lane become what the keys received.
    void close_received(Mark tile) {
        float *to = w.received + (part * heads + head) * w.keys + tile.first;
        for (int64_t k = 0; k < tile.last - tile.first; k += LANES) {
            F x[LANES], total = {};
            EACH(n, LANES) x[n] = load(received + (k + n) * LANES);
            transpose(x);
            EACH(n, LANES) total += x[n];
            add_to(to + k, total);
            bad += total * 0.0f;
        }
    }

    void copy_rows(const Block &block, int g, Mark own, const F (&factors)[VECTORS]) {
        for (int64_t n = 0; n < w.chosen; ++n) {
            const int64_t lane = w.chosen_rows[n] - block.first - g * GROUP;
            if (lane < 0 || lane >= least(GROUP, block.rows - g * GROUP)) continue;
            float *to = w.chosen_weights + (head * w.chosen + n) * a.Tk;
            for (int64_t k = own.first; k < own.last; ++k)
                to[k] = own.weights[(k - own.first) * GROUP + lane] * factors[lane / LANES][lane % LANES];
        }
    }

    // A tile's cells: lanes are turned to rows, and rows of one cell are added up.
    void close_cells(int64_t rows, int64_t first, int64_t count) {
        for (int64_t from = 0; from < rows; from += LANES)
            for (int64_t c = 0; c < count; c += LANES) {
                F sums[LANES], mosts[LANES], total = {}, most = {};
                EACH(n, LANES) {
                    sums[n] = load(cells + (c + n) * BLOCK + from);
                    mosts[n] = load(cells + (CELLS + c + n) * BLOCK + from);
                }
                transpose(sums), transpose(mosts);
                for (int64_t n = from, stop = least(from + LANES, rows); n < stop; ++n) {
                    total += sums[n - from], most = larger(mosts[n - from], most);
                    if (n + 1 < stop && cell[n + 1] == cell[n]) continue;
                    add_cells(cell[n] + first + c, total * share[n], most, count - c);
                    total = most = F{};
                }
            }
    }
    void add_cells(float *to, F total, F most, int64_t count) {
        float *to_max = to + heads * (height + (edge < 0 ? 0 : w.splits)) * w.columns;
        if (count >= LANES) return add_to(to, total), store(to_max, larger(most, load(to_max)));
        for (int64_t n = 0; n < count; ++n) to[n] += total[n], to_max[n] = to_max[n] < most[n] ? most[n] : to_max[n];
    }
};

template <int SCORE>
int32_t observe(const Observed &call) {
    const Arguments &a = call.call;
    const Wanted &w = call.wanted;
    if (!finite_keys(a)) return REGARD_NOT_FINITE;
    const int64_t height = height_of(a), blocks = (a.Tq + height - 1) / height, heads = a.B * a.H;
    const int64_t floats = floats_of<Watch>(a, w, 0, 0, 0);
    // A part of a head's blocks, one after another. The last rows of a causal mask are the longest: they go first.
    return on_threads(a.threads, heads * w.splits, floats, [&](int64_t number) {
        const int64_t head = number % heads, part = w.splits - 1 - number / heads, from = part * blocks / w.splits;
        Watch watch(a, w, head, part, from * height, arena());
        if (!head) w.starts[part] = from * height / w.tall;
        bool finite = true;
        for (int64_t n = from; n < (part + 1) * blocks / w.splits; ++n) {
            const int64_t rows = least(height, a.Tq - n * height);
            watch.open_block(n * height, rows);
            finite &= forward_block<SCORE>(a, head / a.H, head % a.H, n * height, rows, watch.forward, watch);
        }
        return finite && watch.finite() ? REGARD_OK : REGARD_NOT_FINITE;
    });
}
}  // namespace observing
}  // namespace
