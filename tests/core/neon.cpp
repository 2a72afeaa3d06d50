// Calls the compiled kernels beside their definitions in double, without Python: scripts/neon builds it for ARM.
// Prints the largest difference of each, and fails where one is beyond 1e-5.
#include <cmath>
#include <cstdio>
#include <cstring>
#include <random>
#include <vector>

#include "../../csrc/arguments.h"
#include "../../csrc/regard.h"

extern "C" int32_t regard_call(int32_t which, void *arguments);

namespace {
constexpr int H = 2, TK = 53, D = 20, DV = 24;  // one sample, one key head
typedef std::vector<double> Row;

struct Call {
    const char *name;
    int64_t score, normalize;
    int Tq;
};

struct Numbers {
    std::vector<float> query, key, value, weight, grad;
    explicit Numbers(int Tq) {
        std::mt19937 chance(3);
        std::normal_distribution<float> draw;
        const auto fill = [&](std::vector<float> &to, int count) {
            for (int n = 0; n < count; ++n) to.push_back(draw(chance));
        };
        fill(query, H * Tq * D), fill(key, TK * D), fill(value, TK * DV), fill(weight, H * D), fill(grad, H * Tq * DV);
    }
};

double scale_of(const Call &call) { return call.score == ADDITIVE ? 1.0 : 1.0 / std::sqrt(double(D)); }

Row weights_of(const Call &call, const Numbers &x, int h, int i) {
    Row row(TK);
    for (int j = 0; j < TK; ++j)
        for (int d = 0; d < D; ++d) {
            const double q = x.query[(h * call.Tq + i) * D + d], k = x.key[j * D + d];
            row[j] += call.score == ADDITIVE ? x.weight[h * D + d] * std::tanh(q + k) : q * k * scale_of(call);
        }
    double low = -1e3, high = 1e3, top = row[0], total = 0;
    for (double score : row) top = score > top ? score : top;
    for (int step = 0; step < 200 && call.normalize == SPARSEMAX; ++step) {
        const double tau = (low + high) / 2;
        total = 0;
        for (double score : row) total += score > tau ? score - tau : 0;
        (total > 1 ? low : high) = tau;
    }
    total = 0;
    for (double &score : row) {
        score = call.normalize == SPARSEMAX ? (score > low ? score - low : 0) : std::exp(score - top);
        total += score;
    }
    for (double &weight : row) weight /= total;
    return row;
}

// The gradient of the scores of a row under softmax.
Row slopes_of(const Call &call, const Numbers &x, int h, int i, const Row &weights) {
    Row slopes(TK);
    double mean = 0;
    for (int j = 0; j < TK; ++j) {
        for (int c = 0; c < DV; ++c) slopes[j] += double(x.grad[(h * call.Tq + i) * DV + c]) * x.value[j * DV + c];
        mean += weights[j] * slopes[j];
    }
    for (int j = 0; j < TK; ++j) slopes[j] = weights[j] * (slopes[j] - mean);
    return slopes;
}

void larger(double &worst, double found, double exact) {
    const double apart = std::fabs(found - exact);
    if (!(apart <= worst)) worst = apart;
}

bool check(const Call &call) {
    const int Tq = call.Tq, wide = 64;
    const Numbers x(Tq);
    std::vector<float> output(H * Tq * DV), rows(2 * H * Tq), lse(H * Tq), dquery(H * Tq * D), dkey(TK * wide);
    std::vector<float> dvalue(TK * wide), dweight(H * D);
    Arguments a;
    std::memset(&a, 0, sizeof a);
    a.B = 1, a.H = H, a.Hkv = 1, a.Tq = Tq, a.Tk = TK, a.D = D, a.Dv = DV, a.threads = 1;
    a.score = call.score, a.normalize = call.normalize, a.factor = scale_of(call), a.raised = 1;
    a.query = {x.query.data(), H * Tq * D, Tq * D, D};
    a.key = {x.key.data(), TK * D, TK * D, D}, a.value = {x.value.data(), TK * DV, TK * DV, DV};
    a.weight = {x.weight.data(), 0, D};
    a.output = output.data();
    if (Tq > 12) a.rows = rows.data(), a.lse = call.normalize == SOFTMAX ? lse.data() : nullptr;  // else: decode
    int32_t status = regard_call(REGARD_FORWARD, &a);
    const bool back = Tq > 12 && call.normalize == SOFTMAX;
    if (back) {
        a.grad_output = {x.grad.data(), H * Tq * DV, Tq * DV, DV}, a.result = {output.data(), H * Tq * DV, Tq * DV, DV};
        a.dquery = dquery.data(), a.dkey = dkey.data(), a.dvalue = dvalue.data(), a.splits = 1;
        a.dweight = call.score == ADDITIVE ? dweight.data() : nullptr;
        status |= regard_call(REGARD_BACKWARD, &a);
    }
    double worst = 0, worst_query = 0;
    for (int h = 0; h < H; ++h)
        for (int i = 0; i < Tq; ++i) {
            const Row weights = weights_of(call, x, h, i), slopes = slopes_of(call, x, h, i, weights);
            for (int c = 0; c < DV; ++c) {
                double exact = 0;
                for (int j = 0; j < TK; ++j) exact += weights[j] * x.value[j * DV + c];
                larger(worst, output[(h * Tq + i) * DV + c], exact);
            }
            for (int d = 0; d < D && back; ++d) {
                double exact = 0;
                for (int j = 0; j < TK; ++j) {
                    const double q = x.query[(h * Tq + i) * D + d], k = x.key[j * D + d], t = std::tanh(q + k);
                    const double slope = call.score == ADDITIVE ? x.weight[h * D + d] * (1 - t * t) : k * scale_of(call);
                    exact += slopes[j] * slope;
                }
                larger(worst_query, dquery[(h * Tq + i) * D + d], exact);
            }
        }
    std::printf("%-24s status %d, output %.1e, gradient of the query %.1e\n", call.name, status, worst, worst_query);
    return status == REGARD_OK && worst <= 1e-5 && worst_query <= 1e-5;
}
}  // namespace

int main() {
    const Call calls[] = {
        {"dot, softmax", DOT, SOFTMAX, 37},      {"additive, softmax", ADDITIVE, SOFTMAX, 37},
        {"dot, sparsemax", DOT, SPARSEMAX, 37},  {"additive, sparsemax", ADDITIVE, SPARSEMAX, 5},
        {"decode, 1 query", DOT, SOFTMAX, 1},    {"decode, 3 queries", DOT, SOFTMAX, 3},
    };
    bool right = true;
    for (const Call &call : calls) right &= check(call);
    return right ? 0 : 1;
}
