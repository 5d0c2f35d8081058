// All kernels of one instruction set.
#pragma once
#include "dot.h"
#include "pair_sum.h"

namespace fxopt::FXOPT_ISA {

extern const Kernels kernels = {dot, dot_backward, pair_sum, pair_sum_backward};

}  // namespace fxopt::FXOPT_ISA
