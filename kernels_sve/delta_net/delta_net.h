// The kernels of a gated delta net's layer: the delta rule, the convolution before it and the norm after it.
#pragma once
#include "delta_net/convolution.h"
#include "delta_net/delta_rule.h"
#include "delta_net/gated_norm.h"
