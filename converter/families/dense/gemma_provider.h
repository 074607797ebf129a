// The models that Megatron-Bridge makes of Gemma's families.
#pragma once

#include "converter/families/bridge_model.h"

namespace ferry::converter {

extern const BridgeModel kGemma2Provider;
extern const BridgeModel kGemma3Provider;
extern const BridgeModel kGemma3SeeingProvider;
extern const BridgeModel kGemma4Provider;

}  // namespace ferry::converter
