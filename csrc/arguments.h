// A call of the kernels: pointers, sizes and strides (in elements). src/regard/kernels/native.py packs the same list.
#pragma once
#include <cstdint>

namespace {
enum Kind : int64_t { FLOAT32 = 0, BFLOAT16 = 1, FLOAT16 = 2 };
enum Score : int64_t { DOT = 0, ADDITIVE = 1 };
enum Normalize : int64_t { SOFTMAX = 0, SIGMOID = 1, RELU = 2, SPARSEMAX = 3, ENTMAX15 = 4, ENTMAX = 5 };

// (B, heads, T, width), the last dimension dense.
struct Rows4 {
    const void *data;
    int64_t b, h, t;
    int64_t place(int64_t bi, int64_t hi, int64_t ti) const { return bi * b + hi * h + ti * t; }
};
// A number (or a vector, or a diagonal) a sample and head; stride 0 where it is shared, null where there is none.
struct ByHead {
    const float *data;
    int64_t b, h;
    const float *at(int64_t bi, int64_t hi) const { return data + bi * b + hi * h; }
};
// A number a pair.
template <class T>
struct Pairs {
    T *data;
    int64_t b, h, q, k;
    T *at(int64_t bi, int64_t hi) const { return data + bi * b + hi * h; }
};
// An end of a run, a row.
struct Ends {
    const int64_t *data;
    int64_t b, h, q;
    int64_t at(int64_t bi, int64_t hi, int64_t i, int64_t otherwise) const {
        return data ? data[bi * b + hi * h + i * q] : otherwise;
    }
};

struct Arguments {
    int64_t B, H, Hkv, Tq, Tk, D, Dv;
    int64_t kind, score, normalize, threads;
    Rows4 query, key, value;
    ByHead scale, weight, sink, alpha, shift, diagonal;  // diagonal: the entry at 0 is that of j = i
    Pairs<const float> bias;
    Pairs<const uint8_t> dense;
    int64_t negated, runs, left[2], right[2];  // runs: how many; 0 means that every key may be seen
    Ends start[2], stop[2];
    const int64_t *offsets;
    int64_t offset, dropped, seed, threshold;
    void *output;        // (B, H, Tq, Dv), dense
    float *lse, *rows;   // (B, H, Tq) or null; (n, B, H, Tq) or null: maximum and total, or threshold
    int64_t carried;     // rows go on with the output before it is rounded, (Dv, B, H, Tq)
    // Backward only.
    Rows4 grad_output, result;
    const float *grad_lse;  // (B, H, Tq) or null
    float *dquery, *dkey, *dvalue;  // (B, H, Tq, D); (splits, B, Hkv, Tk, padded D); (splits, B, Hkv, Tk, padded Dv)
    float *drow, *ddiagonal, *dweight;  // (B, H, Tq); (splits, B, H, length), at 0 as diagonal; (splits, B, H, D)
    Pairs<float> dbias;
    int64_t dbias_split, ddiagonal_split, splits, in_turn;
    double factor, softcap, raised;
};

static_assert(sizeof(Arguments) == 109 * 8, "native.py packs 106 integers and 3 doubles");

constexpr int64_t UNLIMITED = int64_t(1) << 40;
}  // namespace
