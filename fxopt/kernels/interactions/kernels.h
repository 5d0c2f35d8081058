// All kernels of one instruction set.
#pragma once
#include "attention.h"
#include "dot.h"
#include "pair_sum.h"

namespace fxopt::FXOPT_ISA {

extern const Kernels kernels = {dot, dot_backward, attention, pair_sum, pair_sum_backward};

}  // namespace fxopt::FXOPT_ISA
