// Baseline code: which copies of the kernels were compiled in, which run on this processor, and which one is used.
#include <atomic>
#include <cstring>
#include <string>

#include "regard.h"

#if defined(__x86_64__)
#include <cpuid.h>
#endif

#define REGARD_EXPORT extern "C" __attribute__((visibility("default")))

#define REGARD_VARIANT(name) extern "C" const RegardKernels regard_kernels_##name;
REGARD_VARIANTS
#undef REGARD_VARIANT

namespace {
#if defined(__x86_64__)
// The flags that the psABI's levels ask for beyond what __builtin_cpu_supports knows by name in every compiler.
bool level3() {
    unsigned a = 0, b = 0, c = 0, d = 0;
    const unsigned fma = 1u << 12, movbe = 1u << 22, f16c = 1u << 29, lzcnt = 1u << 5, leaf1 = fma | movbe | f16c;
    if (!__get_cpuid(1, &a, &b, &c, &d) || (c & leaf1) != leaf1) return false;
    if (!__get_cpuid(0x80000001, &a, &b, &c, &d) || (c & lzcnt) == 0) return false;
    return __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") && __builtin_cpu_supports("bmi") &&
           __builtin_cpu_supports("bmi2");
}

bool level4() {
    return level3() && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
           __builtin_cpu_supports("avx512cd") && __builtin_cpu_supports("avx512dq") &&
           __builtin_cpu_supports("avx512vl");
}
#endif

bool runs(const char *name) {
#if defined(__x86_64__)
    __builtin_cpu_init();
    if (std::strcmp(name, "v4") == 0) return level4();
    return (std::strcmp(name, "v3") == 0 || std::strcmp(name, "wide") == 0) && level3();
#else
    return std::strcmp(name, "neon") == 0;
#endif
}

struct Variant {
    const char *name;
    const RegardKernels *kernels;
};

// In order of preference. "wide" is the 16-lane code on level 3, there for tests: never chosen by itself.
#define REGARD_VARIANT(name) {#name, &regard_kernels_##name},
const Variant variants[] = {REGARD_VARIANTS};
#undef REGARD_VARIANT

const Variant *preferred() {
    for (const Variant &variant : variants)
        if (std::strcmp(variant.name, "wide") != 0 && runs(variant.name)) return &variant;
    return nullptr;
}

std::atomic<const Variant *> &selected() {
    static std::atomic<const Variant *> one{preferred()};
    return one;
}

std::string names(bool runnable) {
    std::string found;
    for (const Variant &variant : variants)
        if (!runnable || runs(variant.name)) found += (found.empty() ? "" : " ") + std::string(variant.name);
    return found;
}
}  // namespace

REGARD_EXPORT int32_t regard_abi() { return REGARD_ABI; }

// The copies that were compiled in, and those of them that run here; separated by spaces, best first.
REGARD_EXPORT const char *regard_compiled() {
    static const std::string found = names(false);
    return found.c_str();
}

REGARD_EXPORT const char *regard_variants() {
    static const std::string found = names(true);
    return found.c_str();
}

// The copy in use, "" where none of them runs here.
REGARD_EXPORT const char *regard_selected() {
    const Variant *variant = selected().load();
    return variant ? variant->name : "";
}

REGARD_EXPORT int32_t regard_select(const char *name) {
    for (const Variant &variant : variants) {
        if (std::strcmp(variant.name, name) != 0 || !runs(name)) continue;
        selected().store(&variant);
        return REGARD_OK;
    }
    return REGARD_NO_VARIANT;
}

REGARD_EXPORT int32_t regard_call(int32_t which, void *arguments) {
    const Variant *variant = selected().load(std::memory_order_relaxed);
    if (!variant) return REGARD_NO_VARIANT;
    if (which < 0 || which >= REGARD_COUNT) return REGARD_NO_KERNEL;
    return variant->kernels->run[which](arguments);
}
