// Vectors of floats: a few operations on GCC's vector extensions, so that one source serves every instruction set.
// Everything is in an unnamed namespace: each instruction set keeps its own copy, and none leaks into another.
#pragma once
#include <cfloat>
#include <cmath>
#include <cstdint>
#include <cstdlib>
#include <cstring>

#if defined(__AVX2__)
#include <immintrin.h>
#endif
#include "regard.h"

#define REGARD_INLINE static inline __attribute__((always_inline))
#define REGARD_UNROLL _Pragma("GCC unroll 16")
#define EACH(n, count) REGARD_UNROLL for (int n = 0; n < (count); ++n)  // in registers

namespace {
constexpr int LANES = REGARD_LANES;
// A group of queries shares one pass over the keys: as many vectors as the registers of a product tile allow.
constexpr int VECTORS = LANES == 4 ? 4 : 2;
constexpr int GROUP = VECTORS * LANES;
constexpr int TILE_ROWS = LANES == 16 ? 12 : 6;
constexpr int BLOCK = 128;  // queries at most that pass over the keys together
constexpr int GROUPS = BLOCK / GROUP;

typedef float F __attribute__((vector_size(4 * LANES)));
typedef int32_t I __attribute__((vector_size(4 * LANES)));
typedef uint32_t U __attribute__((vector_size(4 * LANES)));
typedef float Loose __attribute__((vector_size(4 * LANES), aligned(4), may_alias));

constexpr float INF = __builtin_inff();
constexpr float LOG2E = 1.44269504088896341f;
constexpr float LN2 = 0.693147180559945309f;

REGARD_INLINE F load(const float *p) { return *reinterpret_cast<const Loose *>(p); }
REGARD_INLINE void store(float *p, F x) { *reinterpret_cast<Loose *>(p) = x; }
REGARD_INLINE void add_to(float *p, F x) { store(p, load(p) + x); }
REGARD_INLINE F all(float x) { return x - F{}; }
REGARD_INLINE I all(int32_t x) { return x - I{}; }
REGARD_INLINE U all(uint32_t x) { return x - U{}; }
REGARD_INLINE F pick(I where, F yes, F no) { return where ? yes : no; }
REGARD_INLINE F as_float(I x) { return reinterpret_cast<F>(x); }
REGARD_INLINE I as_int(F x) { return reinterpret_cast<I>(x); }

// The larger of a and b; where one of them is not a number, b.
REGARD_INLINE F larger(F a, F b) {
#if defined(__AVX512F__) && REGARD_LANES == 16
    return reinterpret_cast<F>(_mm512_max_ps(reinterpret_cast<__m512>(a), reinterpret_cast<__m512>(b)));
#elif defined(__AVX2__) && REGARD_LANES == 8
    return reinterpret_cast<F>(_mm256_max_ps(reinterpret_cast<__m256>(a), reinterpret_cast<__m256>(b)));
#else
    return a > b ? a : b;
#endif
}
REGARD_INLINE F smaller(F a, F b) { return -larger(-a, -b); }

REGARD_INLINE bool any(I where) {
#if defined(__AVX512F__) && REGARD_LANES == 16
    return _mm512_test_epi32_mask(reinterpret_cast<__m512i>(where), reinterpret_cast<__m512i>(where)) != 0;
#elif defined(__AVX2__) && REGARD_LANES == 8
    return _mm256_movemask_ps(reinterpret_cast<__m256>(where)) != 0;
#else
    int32_t found = 0;
    for (int n = 0; n < LANES; ++n) found |= where[n];
    return found != 0;
#endif
}

REGARD_INLINE float sum(F x) {
    float total = 0;
    for (int n = 0; n < LANES; ++n) total += x[n];
    return total;
}

// 1 / x to about a unit in the last place, for finite x that are not tiny.
REGARD_INLINE F reciprocal(F x) {
#if defined(__AVX512F__) && REGARD_LANES == 16
    const F r = reinterpret_cast<F>(_mm512_rcp14_ps(reinterpret_cast<__m512>(x)));
    return r + r * (1.0f - x * r);
#elif defined(__AVX2__) && REGARD_LANES == 8
    const F r = reinterpret_cast<F>(_mm256_rcp_ps(reinterpret_cast<__m256>(x)));
    return r + r * (1.0f - x * r);
#else
    return 1.0f / x;
#endif
}

// A polynomial in x from its highest coefficient down.
template <class... Rest>
REGARD_INLINE F polynomial(F x, float highest, Rest... rest) {
    F p = all(highest);
    ((p = p * x + rest), ...);
    return p;
}

// 2^n of a number that 1.5 * 2^23 was added to: n in the low bits goes to the exponent.
REGARD_INLINE F power(F shifted) { return as_float(I((U(as_int(shifted)) << 23) + (127u << 23))); }

// 2^(n + f) for |f| <= 1/2, n as `power` takes it.
REGARD_INLINE F power_of(F f, F shifted) {
    return power(shifted) * polynomial(f, 0.0013264726891751761f, 0.009671512910234312f, 0.055507337465879714f,
                                       0.24022242081005665f, 0.693146977595791f, 1.0f);
}

// 2^x, relative error 1e-7; 0 below -126.5, at most 2^127; NaN stays NaN.
REGARD_INLINE F exp2(F x) {
    x = larger(all(-127.0f), x);
    const F shifted = x + 12582912.0f;  // 1.5 * 2^23: the integer nearest to x lands in the low bits
    return power_of(x - (shifted - 12582912.0f), shifted);
}

// e^x for x <= 88, relative error 1e-7 whatever the size of x: 0 below -87.7, NaN stays NaN.
REGARD_INLINE F exp(F x) {
    x = larger(all(-88.1f), x);
    const F shifted = x * LOG2E + 12582912.0f, n = shifted - 12582912.0f;
    return power_of((x * LOG2E - n) + x * 1.925963033e-8f, shifted);  // log2(e) in two parts
}

REGARD_INLINE F exp2_bounded(F x) { return exp2(smaller(all(127.0f), x)); }

// log2(u) of normal u > 0 (finite for 0 and denormal ones), `lost` more where that is what rounding took from u,
// relative to it. The mantissa comes between sqrt(1/2) and twice that.
REGARD_INLINE F log2_of(F u, F lost) {
    const I bits = I(U(as_int(u)) - 0x3F3504F3u);
    const F f = as_float((bits & 0x7FFFFF) + 0x3F3504F3) - 1.0f, z = f * f;
    const F p = polynomial(f, 6.7466367599e-02f, -1.1675679377e-01f, 1.1888178819e-01f, -1.2405586156e-01f,
                           1.4219549981e-01f, -1.6667995894e-01f, 2.0002118763e-01f, -2.5000009600e-01f,
                           3.3333312603e-01f);
    return ((lost + (p * f * z - 0.5f * z)) + f) * LOG2E + __builtin_convertvector(bits >> 23, F);
}

// tanh x to a few units in the last place: a polynomial near 0, 1 - 2 / (e^2x + 1) beyond.
REGARD_INLINE F tanh(F x) {
    const F size = larger(x, -x), z = x * x;
    const F near = x + x * z * polynomial(z, 0.019800116496404417f, -0.05379435003131482f, 0.13332751169672014f,
                                          -0.3333332725265982f);
    const F far = 1.0f - 2.0f / (exp2(smaller(size, all(20.0f)) * (2 * LOG2E)) + 1.0f);
    const F signed_far = pick(x < all(0.0f), -far, far);
    return pick(size < all(0.32f), near, pick(x == x, signed_far, x));
}

#define REGARD_LOW4 0, 4, 1, 5
#define REGARD_HIGH4 2, 6, 3, 7
#define REGARD_LOW8 0, 8, 1, 9, 2, 10, 3, 11
#define REGARD_HIGH8 4, 12, 5, 13, 6, 14, 7, 15
#define REGARD_LOW16 0, 16, 1, 17, 2, 18, 3, 19, 4, 20, 5, 21, 6, 22, 7, 23
#define REGARD_HIGH16 8, 24, 9, 25, 10, 26, 11, 27, 12, 28, 13, 29, 14, 30, 15, 31

#if defined(__AVX2__) && REGARD_LANES == 8
REGARD_INLINE F low_pairs(F a, F b) { return __builtin_shufflevector(a, b, 0, 8, 1, 9, 4, 12, 5, 13); }
REGARD_INLINE F high_pairs(F a, F b) { return __builtin_shufflevector(a, b, 2, 10, 3, 11, 6, 14, 7, 15); }
REGARD_INLINE F low_fours(F a, F b) { return __builtin_shufflevector(a, b, 0, 1, 8, 9, 4, 5, 12, 13); }
REGARD_INLINE F high_fours(F a, F b) { return __builtin_shufflevector(a, b, 2, 3, 10, 11, 6, 7, 14, 15); }

// Transposes 8 vectors of 8: within halves, which is cheap, then the halves.
REGARD_INLINE void transpose(F (&x)[8]) {
    F y[8], z[8];
    REGARD_UNROLL
    for (int n = 0; n < 8; n += 2) y[n] = low_pairs(x[n], x[n + 1]), y[n + 1] = high_pairs(x[n], x[n + 1]);
    REGARD_UNROLL
    for (int n = 0; n < 8; n += 4) {
        z[n] = low_fours(y[n], y[n + 2]), z[n + 1] = high_fours(y[n], y[n + 2]);
        z[n + 2] = low_fours(y[n + 1], y[n + 3]), z[n + 3] = high_fours(y[n + 1], y[n + 3]);
    }
    EACH(n, 4) {
        x[n] = __builtin_shufflevector(z[n], z[n + 4], 0, 1, 2, 3, 8, 9, 10, 11);
        x[n + 4] = __builtin_shufflevector(z[n], z[n + 4], 4, 5, 6, 7, 12, 13, 14, 15);
    }
}
#else
// Transposes LANES vectors: interleaving halves log2(LANES) times.
REGARD_INLINE void transpose(F (&x)[LANES]) {
    REGARD_UNROLL
    for (int stage = 1; stage < LANES; stage *= 2) {
        F y[LANES];
        EACH(n, LANES / 2) {
            y[2 * n] = __builtin_shufflevector(x[n], x[n + LANES / 2], REGARD_JOIN(REGARD_LOW, REGARD_LANES));
            y[2 * n + 1] = __builtin_shufflevector(x[n], x[n + LANES / 2], REGARD_JOIN(REGARD_HIGH, REGARD_LANES));
        }
        EACH(n, LANES) x[n] = y[n];
    }
}
#endif

REGARD_INLINE F reversed(F x) {
    I order;
    for (int n = 0; n < LANES; ++n) order[n] = LANES - 1 - n;
    return __builtin_shuffle(x, order);
}

REGARD_INLINE int64_t least(int64_t a, int64_t b) { return a < b ? a : b; }
REGARD_INLINE int64_t most(int64_t a, int64_t b) { return a > b ? a : b; }
}  // namespace
