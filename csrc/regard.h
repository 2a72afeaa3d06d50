// The compiled part of regard: plain C at the border, pointers, sizes and strides in structs, no torch headers.
// kernels.cpp is compiled once for every instruction set; each copy is one table. dispatch.cpp picks a table.
#pragma once
#include <cstdint>

// Raised with every change of a struct or of the order of the kernels: src/regard/kernels/_library.py has its twin.
#define REGARD_ABI 7

// Every kernel takes a pointer to its own struct of arguments and returns a status.
typedef int32_t (*RegardKernel)(void *arguments);

// Not finite: something in the call is not, or overflowed; what was written is not to be used.
enum RegardStatus : int32_t {
    REGARD_OK = 0,
    REGARD_NO_KERNEL = 1,
    REGARD_NO_VARIANT = 2,
    REGARD_NO_MEMORY = 3,
    REGARD_NOT_FINITE = 4
};

// The number of a kernel in the table, and in regard_call.
enum RegardWhich : int32_t { REGARD_FORWARD, REGARD_BACKWARD, REGARD_OBSERVE, REGARD_COUNT };

typedef struct {
    RegardKernel run[REGARD_COUNT];
} RegardKernels;

#define REGARD_JOIN_(a, b) a##b
#define REGARD_JOIN(a, b) REGARD_JOIN_(a, b)
#define REGARD_TABLE REGARD_JOIN(regard_kernels_, REGARD_ISA)
