// The one matrix product of the library: C (rows x GROUP) = or += A (rows x depth) B (depth x GROUP).
// A is read in place, one number at a time; a group of lanes of B and C is a few whole vectors.
#pragma once
#include "simd.h"

namespace {
// Changes the numbers of a tile [key][lane]: f(number, key, vector).
template <class Change>
REGARD_INLINE void change(float *tile, int64_t keys, int64_t ld, Change f) {
    for (int64_t k = 0; k < keys; ++k, tile += ld)
        EACH(n, VECTORS) store(tile + n * LANES, f(load(tile + n * LANES), k, n));
}

constexpr int64_t AHEAD = 8;

// COLUMN: the depth runs along A's unit stride (A of row r at depth k is A[r * stride + k]); else its rows do
// (A[k * stride + r]).
template <int ROWS, bool COLUMN, bool ADD>
REGARD_INLINE void product_tile(const float *A, int64_t stride, const float *B, int64_t ldb, float *C, int64_t ldc,
                                int64_t depth) {
    F sums[ROWS][VECTORS];
    EACH(r, ROWS) {
        EACH(n, VECTORS) sums[r][n] = F{};
    }
    const auto step = [&] {
        F b[VECTORS];
        EACH(n, VECTORS) b[n] = load(B + n * LANES);
        EACH(r, ROWS) {
            const F a = all(COLUMN ? A[r * stride] : A[r]);
            EACH(n, VECTORS) sums[r][n] += a * b[n];
        }
        A += COLUMN ? 1 : stride;
        B += ldb;
    };
    if constexpr (COLUMN) {
        int64_t k = 0;
        for (; k + 16 <= depth; k += 16) {
            EACH(r, ROWS) __builtin_prefetch(A + (r + ROWS) * stride);  // the next tile's
            for (int n = 0; n < 16; ++n) step();
        }
        for (; k < depth; ++k) step();
    } else {
        for (int64_t k = 0; k < depth; ++k) {
            __builtin_prefetch(A + AHEAD * stride);
            step();
        }
    }
    EACH(r, ROWS) {
        EACH(n, VECTORS) {
            float *at = C + r * ldc + n * LANES;
            store(at, ADD ? load(at) + sums[r][n] : sums[r][n]);  // sums of sums: long ones stay accurate
        }
    }
}

template <int ROWS, bool COLUMN, bool ADD>
__attribute__((noinline)) void product_tiles(int64_t tiles, const float *A, int64_t stride, const float *B,
                                             int64_t ldb, float *C, int64_t ldc, int64_t depth) {
    for (int64_t n = 0; n < tiles; ++n) {
        product_tile<ROWS, COLUMN, ADD>(A, stride, B, ldb, C, ldc, depth);
        A += COLUMN ? ROWS * stride : ROWS;
        C += ROWS * ldc;
    }
}

template <int ROWS, bool COLUMN, bool ADD>
void product_rest(int64_t rows, const float *A, int64_t stride, const float *B, int64_t ldb, float *C, int64_t ldc,
                  int64_t depth) {
    if constexpr (ROWS > 0) {
        if (rows == ROWS) product_tiles<ROWS, COLUMN, ADD>(1, A, stride, B, ldb, C, ldc, depth);
        else product_rest<ROWS - 1, COLUMN, ADD>(rows, A, stride, B, ldb, C, ldc, depth);
    }
}

template <bool COLUMN, bool ADD>
void product(int64_t rows, int64_t depth, const float *A, int64_t stride, const float *B, int64_t ldb, float *C,
             int64_t ldc) {
    const int64_t tiles = rows / TILE_ROWS, done = tiles * TILE_ROWS;
    product_tiles<TILE_ROWS, COLUMN, ADD>(tiles, A, stride, B, ldb, C, ldc, depth);
    if (done < rows)
        product_rest<TILE_ROWS - 1, COLUMN, ADD>(rows - done, A + (COLUMN ? done * stride : done), stride, B, ldb,
                                                 C + done * ldc, ldc, depth);
}
}  // namespace
