// The kernels of vectors that multiply and add in float32; included last, in the place of merge.h.
#include "fused.h"

using Products = Fused;

#include "merge.h"
#include "tracked.h"
