// The modules that an adapter changes, as Megatron-Bridge looks for them in its model: by a name,
// or by a pattern of the whole name with wildcards (megatron/bridge/peft/module_matcher.py). What
// is named too much gets factors that the checkpoint lacks.
#pragma once

#include <string>
#include <vector>

#include "converter/adapter/open_adapter.h"

namespace ferry::converter {

// Names where all modules of the name are adapted alike, else patterns for those of all layers.
// Throws Error(kLayout) for query, key and value or gate and up with one first factor, which
// CanonicalLoRA has not, and for a module that is adapted in some of the layers that have it.
std::vector<std::string> target_modules(const Adapter& adapter, const ModelMap& base);

}  // namespace ferry::converter
