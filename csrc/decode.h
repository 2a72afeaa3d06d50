// Decode: a few queries against a long cache. All rows of a key head (query heads of its group times queries) pass over
// a batch of its keys and values together.
//     scores = query . key  ->  weights = softmax (running maximum)  ->  output = sum of weights times values
// Keys are summed up in parts of fixed length, parts in turn, splits over threads in turn: the same bits every time.
#pragma once
#include "cache.h"
#include "scores.h"

namespace {
constexpr int64_t MOST_QUERIES = 12;         // measured: beyond, the lanes of `forward` are full enough
constexpr int64_t MOST_ROWS = 64;            // of a key head
constexpr int64_t PART = 480;                // keys summed up by themselves: errors grow with their number
constexpr int64_t FETCHES = 512;             // of a batch at most
constexpr int64_t WORTH_A_TEAM = 200000;     // multiply-adds, below which threads cost more than they bring
constexpr float NEAR = 7.0f;                 // weights may reach e^7

// What all key heads of a call share. The rows of one (row n is query n % Tq of its query head n / Tq) go by quads of
// `tall` rows; the last quad ends with copies of the last row.
struct Layout {
    const Arguments &a;
    int64_t rows, quads, tall, all_rows, batch, query_apart, apart, next_keys[FETCHES], next_values[FETCHES];

    explicit Layout(const Arguments &a) : a(a), rows(a.H / a.Hkv * a.Tq) {
        quads = up(rows, 4), tall = up(rows, quads), all_rows = quads * tall;
        const int64_t size = bytes_of(a.kind), keys = keys_at_once(tall), columns = vectors_at_once(tall) * LANES;
        batch = batch_of(tall) * (most(a.D, a.Dv) * size < 256 ? 2 : 1);
        query_apart = up(a.D, LANES) * LANES, apart = up(a.Dv, columns) * columns;
        const int64_t scoring = batch / keys * up(a.D, LANES) * up(keys * LANES * size, LINE);
        const int64_t mixing = batch * (apart / columns) * up(columns * size, LINE);
        put_in_order(batch, a.value.t * size, a.Dv * size, scoring, next_values);
        put_in_order(batch, a.key.t * size, a.D * size, mixing, next_keys);
    }
    int64_t totals() const { return Arena::padded(rows * (apart + 2)); }
    int64_t floats() const { return all_rows * (query_apart + apart + 2 * LANES + batch * 4) + totals() + 16 * 6; }
};

// What is summed up: outputs [row][column], peak and total a row.
struct Totals {
    float *output, *peak, *total;
    int64_t apart;
    Totals(const Layout &p, float *room)
        : output(room), peak(room + p.rows * p.apart), total(peak + p.rows), apart(p.apart) {}
    // Adds what other keys of row m came to.
    void add(int64_t m, const float *other, float other_peak, float other_total) const {
        if (other_peak == -INF) return;
        const float top = peak[m] > other_peak ? peak[m] : other_peak;
        const float own = ::expf(peak[m] - top), its = ::expf(other_peak - top);
        float *to = output + m * apart;
        for (int64_t c = 0; c < apart; c += LANES) store(to + c, load(to + c) * own + load(other + c) * its);
        total[m] = total[m] * own + other_total * its;
        peak[m] = top;
    }
};

struct Team {
    const Layout &p;
    const Arguments &a;
    int64_t b, hkv, range[2][2] = {};  // pieces [range[r][0], range[r][1]) of the keys that some row sees
    int runs = 1, ranges = 0;
    int64_t low[2][MOST_ROWS], high[2][MOST_ROWS];
    float *query = nullptr, *part = nullptr, *peak = nullptr, *total = nullptr, *tiles = nullptr;
    F odd = {};  // 0 as long as all scores are finite

    Team(const Layout &p, int64_t n) : p(p), a(p.a), b(n / p.a.Hkv), hkv(n % p.a.Hkv) {}
    int64_t head(int64_t m) const { return hkv * (a.H / a.Hkv) + least(m, p.rows - 1) / a.Tq; }
    int64_t row(int64_t m) const { return least(m, p.rows - 1) % a.Tq; }
    const char *at(const Rows4 &x, int64_t key) const {
        return static_cast<const char *>(x.data) + x.place(b, hkv, key) * bytes_of(a.kind);
    }

    void open(Arena &room) {
        query = room.take(p.all_rows * p.query_apart);
        part = room.take(p.all_rows * p.apart);
        peak = room.take(p.quads * LANES), total = room.take(p.quads * LANES);
        tiles = room.take(p.quads * p.batch * places(p.tall));
        runs = a.runs ? int(a.runs) : 1;
        for (int r = 0; r < runs; ++r) {
            int64_t from = a.Tk, to = 0;
            for (int64_t m = 0; m < p.all_rows; ++m) look(r, m, from, to);
            if (from >= to) continue;
            const bool meets = ranges && from < range[0][1] && range[0][0] < to;
            int64_t *into = range[meets ? 0 : ranges++];
            into[0] = meets ? least(into[0], from) : from, into[1] = meets ? most(into[1], to) : to;
        }
        load_query();
    }

    void look(int r, int64_t m, int64_t &from, int64_t &to) {
        const int64_t h = head(m), i = row(m), place = i + (a.offsets ? a.offsets[b] : a.offset);
        int64_t first = 0, last = a.Tk;
        if (a.runs) {
            if (a.left[r] != UNLIMITED) first = most(first, place - a.left[r]);
            if (a.right[r] != UNLIMITED) last = least(last, place + a.right[r] + 1);
            first = most(first, a.start[r].at(b, h, i, 0)), last = least(last, a.stop[r].at(b, h, i, a.Tk));
        }
        low[r][m] = least(first, a.Tk), high[r][m] = most(last, low[r][m]);
        if (low[r][m] < last) from = least(from, low[r][m]), to = most(to, last);
    }

    // Of keys [first, last) by rows from m on: 0 none is seen, 1 some are, 2 all of them by every row.
    int seen(int64_t m, int64_t first, int64_t last) const {
        bool some = false;
        for (int r = 0; r < runs; ++r) {
            bool every = true;
            for (int64_t n = m; n < m + p.tall; ++n) {
                every &= low[r][n] <= first && high[r][n] >= last;
                some |= low[r][n] < last && high[r][n] > first;
            }
            if (every) return 2;
        }
        return some;
    }

    // Queries times what makes scores of products; what the last step reads again is 0.
    void load_query() const {
        alignas(64) float whole[256];
        std::memset(query, 0, p.all_rows * p.query_apart * sizeof(float));
        for (int64_t m = 0; m < p.all_rows; ++m) {
            const float factor = scale_of(a, b, head(m)) / (a.softcap > 0 ? float(a.softcap) : 1.0f);
            widen(a.query.data, a.kind, a.query.place(b, head(m), row(m)), a.D, whole);
            for (int64_t d = 0; d < a.D; ++d)
                query[m * p.query_apart + d + d / LANES * LANES - column_of(d / LANES, a.D)] = whole[d] * factor;
        }
    }
};

// Soft-cap, bias and mask of rows from m on, on keys [first, last) of a tile of `numbers` scores.
template <int ROWS>
void finish_tile(Team &team, int64_t m, int64_t first, int64_t last, int64_t numbers, float *tile) {
    const Arguments &a = team.a;
    for (int64_t n = 0; n < numbers; n += LANES) {
        const F x = load(tile + n);
        team.odd += x * 0.0f;
        if (a.softcap > 0) store(tile + n, tanh(x) * float(a.softcap));
    }
    for (int n = 0; n < ROWS; ++n) {
        const int64_t h = team.head(m + n), i = team.row(m + n);
        for (int64_t k = first; k < last; ++k) {
            float &x = tile[(k - first) * places(ROWS) + n], more = 0;
            if (a.bias.data) more += a.bias.at(team.b, h)[i * a.bias.q + k * a.bias.k];
            if (a.diagonal.data) more += a.diagonal.at(team.b, h)[k - i];
            x += more;
            if (more != -INF) team.odd[0] += x * 0.0f;  // what overflows here is no mask
            bool seen = false;
            for (int r = 0; r < team.runs; ++r) seen |= k >= team.low[r][m + n] && k < team.high[r][m + n];
            if (!seen) x = -INF;
        }
    }
    for (int64_t n = (last - first) * places(ROWS); n < numbers; ++n) tile[n] = -INF;
}

// e^(score - peak). The peak follows the maximum from afar, so that what was summed up is seldom scaled anew.
template <int ROWS>
void weigh_tile(const Team &team, int64_t m, int64_t numbers, float *tile, F &odd) {
    constexpr int WIDE = places(ROWS);
    float *at_peak = team.peak + m / ROWS * LANES, *at_total = team.total + m / ROWS * LANES;
    F peak = load(at_peak), total = load(at_total), top = peak;
    for (int64_t n = 0; n < numbers; n += LANES) {
        odd += load(tile + n) * 0.0f;
        top = larger(load(tile + n), top);
    }
    if (any(top > peak + NEAR)) {
        for (int lane = WIDE; lane < LANES; ++lane)
            if (top[lane] > top[lane % WIDE]) top[lane % WIDE] = top[lane];
        for (int lane = WIDE; lane < LANES; ++lane) top[lane] = top[lane % WIDE];
        const F factor = exp(peak - pick(top == all(-INF), F{}, top));
        for (int n = 0; n < ROWS; ++n)
            for (float *at = team.part + (m + n) * team.p.apart, *end = at + team.p.apart; at < end; at += LANES)
                store(at, load(at) * factor[n]);
        total *= factor, peak = top;
        store(at_peak, peak);
    }
    peak = pick(peak == all(-INF), F{}, peak);
    for (int64_t n = 0; n < numbers; n += LANES) {
        const F weight = exp(load(tile + n) - peak);
        store(tile + n, weight);
        total += weight;
    }
    store(at_total, total);
}

// Keys [from, to) of a part, batch by batch.
template <int KIND, int ROWS>
void decode_part(Team &team, int64_t from, int64_t to) {
    constexpr int64_t WIDE = places(ROWS), AT_ONCE = keys_at_once(ROWS), SIZE = bytes_of(KIND);
    const Layout &p = team.p;
    const Arguments &a = p.a;
    const bool plain = !(a.softcap > 0) && !a.bias.data && !a.diagonal.data;
    for (int64_t first = from; first < to; first += p.batch) {
        const int64_t last = least(first + p.batch, to), count = last - first;
        const int64_t numbers = up(count * WIDE, LANES) * LANES, rounded = up(numbers / WIDE, AT_ONCE) * AT_ONCE;
        const Cached keys{team.at(a.key, first), a.key.t * SIZE, count - 1};
        const Cached values{team.at(a.value, first), a.value.t * SIZE, count - 1};
        const Coming next_values{values.data, p.next_values}, next_keys{keys.data + p.batch * keys.stride, p.next_keys};
        int seen[MOST_ROWS];
        float *tile = team.tiles;
        for (int64_t m = 0; m < p.all_rows; m += ROWS, tile += p.batch * WIDE) {
            if (!(seen[m] = team.seen(m, first, last))) continue;
            F masked = {};
            score_keys<KIND, ROWS>(keys, rounded, a.D, team.query + m * p.query_apart, tile, next_values);
            const bool ready = plain && seen[m] == 2 && count * WIDE == numbers;
            if (!ready) finish_tile<ROWS>(team, m, first, last, numbers, tile);
            weigh_tile<ROWS>(team, m, numbers, tile, ready ? team.odd : masked);
        }
        tile = team.tiles;
        for (int64_t m = 0; m < p.all_rows; m += ROWS, tile += p.batch * WIDE)
            if (seen[m]) mix_values<KIND, ROWS>(values, count, a.Dv, tile, team.part + m * p.apart, next_keys);
    }
}

typedef void (*DecodePart)(Team &, int64_t, int64_t);
template <int KIND>
constexpr DecodePart PARTS[] = {decode_part<KIND, 1>, decode_part<KIND, 2>, decode_part<KIND, 3>, decode_part<KIND, 4>};

// The visible keys [from, to), counted through the ranges, part by part. Whether all scores are finite.
inline bool decode_keys(Team &team, int64_t from, int64_t to, const Totals &totals) {
    static constexpr const DecodePart *parts[] = {PARTS<FLOAT32>, PARTS<BFLOAT16>, PARTS<FLOAT16>};
    const Layout &p = team.p;
    std::memset(totals.output, 0, p.rows * p.apart * sizeof(float));
    for (int64_t m = 0; m < p.rows; ++m) totals.peak[m] = -INF, totals.total[m] = 0.0f;
    for (int64_t n = 0; n < p.quads * LANES; ++n) team.peak[n] = -INF;
    for (int r = 0; r < team.ranges; ++r) {
        const int64_t start = team.range[r][0], length = team.range[r][1] - start, stop = start + least(to, length);
        for (int64_t k = start + most(from, 0); k < stop; k += PART) {
            std::memset(team.part, 0, p.all_rows * p.apart * sizeof(float));
            std::memset(team.total, 0, p.quads * LANES * sizeof(float));
            parts[p.a.kind][p.tall - 1](team, k, least(k + PART, stop));
            for (int64_t m = 0; m < p.rows; ++m) {
                const int64_t at = m / p.tall * LANES, place = m % p.tall;
                float total = 0;
                for (int64_t lane = place; lane < LANES; lane += places(p.tall)) total += team.total[at + lane];
                totals.add(m, team.part + m * p.apart, team.peak[at + place], total);
            }
        }
        from -= length, to -= length;
    }
    return sum(team.odd) == 0.0f;
}

// Divides by the totals (a sink takes its share), writes outputs. Whether all is finite.
inline bool close_rows(const Team &team, const Totals &totals) {
    const Arguments &a = team.a;
    alignas(64) float whole[256];
    float odd = 0;
    for (int64_t m = 0; m < team.p.rows; ++m) {
        const int64_t h = team.head(m), at = (team.b * a.H + h) * a.Tq + team.row(m);
        const float peak = totals.peak[m];
        float total = totals.total[m], own = 1.0f;
        const bool empty = peak == -INF;
        if (a.sink.data && !empty) {
            const float sink = *a.sink.at(team.b, h), top = sink > peak ? sink : peak;
            own = ::expf(peak - top);
            total = total * own + ::expf(sink - top);
        }
        const F factor = all(empty ? 0.0f : own / total);
        for (int64_t n = 0; n < up(a.Dv, LANES); ++n)
            store(whole + column_of(n, a.Dv), load(totals.output + m * totals.apart + n * LANES) * factor);
        for (int64_t c = 0; c < a.Dv; ++c) odd += whole[c] * 0.0f;
        narrow(whole, a.Dv, a.output, a.kind, at * a.Dv);
    }
    return odd == 0.0f;
}

// Whether a call is for `decode` rather than for `forward`.
inline bool decodes(const Arguments &a) {
    const bool kind = a.score == DOT && a.normalize == SOFTMAX && !a.dropped && !a.dense.data && !a.rows;
    const bool there = a.B * a.H * a.Tq * a.Tk > 0 && a.D >= LANES && a.Dv >= LANES;
    return kind && there && a.Tq <= MOST_QUERIES && a.H / a.Hkv * a.Tq <= MOST_ROWS;
}

inline int32_t decode(const Arguments &a) {
    const Layout p(a);
    // Enough pieces of the keys for every thread: the same ones for the same sizes and threads.
    const int64_t heads = a.B * a.Hkv, most_splits = most(1, a.Tk / PART);
    const int64_t splits = a.threads > 1 ? least(up(4 * a.threads, heads), most_splits) : 1;
    const int64_t work = heads * splits, room = p.totals();
    float *shared = splits > 1 ? static_cast<float *>(std::malloc(work * room * sizeof(float))) : nullptr;
    if (splits > 1 && !shared) return REGARD_NO_MEMORY;
    const bool team_pays = heads * p.rows * a.Tk * (a.D + a.Dv) >= WORTH_A_TEAM;
    int32_t status = on_threads(team_pays ? a.threads : 1, work, p.floats(), [&](int64_t n) {
        Team team(p, n / splits);
        team.open(arena());
        int64_t seen = 0;
        for (int r = 0; r < team.ranges; ++r) seen += team.range[r][1] - team.range[r][0];
        const Totals totals(p, shared ? shared + n * room : arena().take(room));
        bool finite = decode_keys(team, seen * (n % splits) / splits, seen * (n % splits + 1) / splits, totals);
        if (splits == 1) finite &= close_rows(team, totals);
        return finite ? REGARD_OK : REGARD_NOT_FINITE;
    });
    for (int64_t n = 0; n < heads && splits > 1 && status == REGARD_OK; ++n) {
        const Totals totals(p, shared + n * splits * room);
        for (int64_t s = 1; s < splits; ++s) {
            const Totals other(p, shared + (n * splits + s) * room);
            for (int64_t m = 0; m < p.rows; ++m)
                totals.add(m, other.output + m * p.apart, other.peak[m], other.total[m]);
        }
        if (!close_rows(Team(p, n), totals)) status = REGARD_NOT_FINITE;
    }
    std::free(shared);
    return status;
}
}  // namespace
