// The files beside an adapter's factors, as text.
#pragma once

#include <string>

#include "converter/adapter/open_adapter.h"

namespace ferry::converter {

// adapter_config.json of PEFT, for an adapter that has none.
std::string peft_config(const Adapter& adapter, const ModelMap& base);

// The section "peft" of Megatron-Bridge's run_config.yaml. Throws Error(kLayout) for an adapter
// whose modules differ in rank or alpha: LoRA there has one of each.
std::string run_config(const Adapter& adapter, const ModelMap& base);

// lora_train_meta.json of verl (verl/utils/checkpoint/fsdp_checkpoint_manager.py).
std::string verl_record(const Adapter& adapter);

}  // namespace ferry::converter
