// Compiled once for every instruction set, with REGARD_ISA its name and REGARD_LANES the floats of its vectors.
#include "regard.h"

#include <omp.h>

#include "forward.h"

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
    return a.score == ADDITIVE ? forward<ADDITIVE>(a) : forward<DOT>(a);
}

}  // namespace

extern "C" const RegardKernels REGARD_TABLE = {{fill, run_forward}};
