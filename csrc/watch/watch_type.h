// A Python type that notes what a reading of live objects saw, and tells in one call whether it is the same still.
#pragma once
#include "../python.h"

namespace lora_merge::watch {

// `Watch`, a new reference.
PyObject* type();

}  // namespace lora_merge::watch
