// Compiled once for every instruction set, with REGARD_ISA its name and REGARD_LANES the floats of its vectors.
#include "regard.h"

#include "decode.h"
#include "observe.h"
#include "threshold_backward.h"

namespace {
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

extern "C" const RegardKernels REGARD_TABLE = {{run_forward, run_backward, run_observe}};
