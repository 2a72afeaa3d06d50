// Compiled once for every instruction set, with REGARD_ISA its name and REGARD_LANES the floats of its vectors.
#include "regard.h"

#include <omp.h>

#include "decode.h"
#include "observe.h"
#include "threshold_backward.h"

namespace {
// One thread opens no parallel region at all: a forked child has no team to open one with.
int32_t fill(void *arguments) {
    auto *call = static_cast<RegardFill *>(arguments);
    if (call->threads <= 1) {
        for (int64_t i = 0; i < call->count; ++i) call->out[i] = call->value;
        call->used = 1;
        return REGARD_OK;
    }
#pragma omp parallel num_threads(call->threads)
    {
#pragma omp single
        call->used = omp_get_num_threads();
#pragma omp for schedule(static)
        for (int64_t i = 0; i < call->count; ++i) call->out[i] = call->value;
    }
    return REGARD_OK;
}

int32_t run_forward(void *arguments) {
    const Arguments &a = *static_cast<const Arguments *>(arguments);
    const bool additive = a.score == ADDITIVE;
    if (a.normalize >= SPARSEMAX) return additive ? threshold_forward<ADDITIVE>(a) : threshold_forward<DOT>(a);
    if (decodes(a)) return decode(a);
    return additive ? forward<ADDITIVE>(a) : forward<DOT>(a);
}

int32_t run_backward(void *arguments) {
    const Arguments &a = *static_cast<const Arguments *>(arguments);
    const bool additive = a.score == ADDITIVE;
    if (a.normalize >= SPARSEMAX) return additive ? backward<ADDITIVE, Strips>(a) : backward<DOT, Strips>(a);
    return additive ? backward<ADDITIVE, Tiles>(a) : backward<DOT, Tiles>(a);
}

int32_t run_observe(void *arguments) {
    const auto &call = *static_cast<const observing::Observed *>(arguments);
    return call.call.score == ADDITIVE ? observing::observe<ADDITIVE>(call) : observing::observe<DOT>(call);
}
}  // namespace

extern "C" const RegardKernels REGARD_TABLE = {{fill, run_forward, run_backward, run_observe}};
