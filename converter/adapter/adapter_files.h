// The files beside an adapter's factors, as text.
#pragma once

#include <string>

#include "converter/adapter/open_adapter.h"

namespace ferry::converter {

// adapter_config.json of PEFT: the adapter's own where it fits the names of experts' factors, else
// one that is made. That of factors apart has one rank and one alpha without patterns, and no
// use_rslora: vLLM and SGLang heed neither of experts.
std::string peft_config(const Adapter& adapter, const ModelMap& base, ExpertNames experts);

// Throws Error(kLayout) for an adapter that vLLM refuses or applies with other factors: modules
// that differ in rank or alpha, DoRA, weights that are saved whole, experts of which only gate and
// up or only down are adapted.
void require_servable(const Adapter& adapter, const ModelMap& base);

// The section "peft" of Megatron-Bridge's run_config.yaml. Throws Error(kLayout) for an adapter
// whose modules differ in rank or alpha, since LoRA there has one of each; and as target_modules()
// does.
std::string run_config(const Adapter& adapter, const ModelMap& base);

// lora_train_meta.json of verl (verl/utils/checkpoint/fsdp_checkpoint_manager.py).
std::string verl_record(const Adapter& adapter);

}  // namespace ferry::converter
